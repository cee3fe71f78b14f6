"""Sources with faults put into them, each switched on by its name in the environment."""

from __future__ import annotations

import json

SWITCH = "FUNCOL_MUTATION"
IS_ON = f"""
#include <cstdlib>
#include <cstring>
static bool is_mutated(const char* name) {{
  const char* const chosen = std::getenv("{SWITCH}");
  return chosen != nullptr && std::strcmp(chosen, name) == 0;
}}
"""


def mutated(source: str, mutations: list[dict[str, str]]) -> str:
    """Returns the source with all faults of a file, each behind its switch. Faults may share a text."""
    by_text: dict[str, list[dict[str, str]]] = {}
    for mutation in mutations:
        by_text.setdefault(mutation["text"], []).append(mutation)
    for text, same in by_text.items():
        if source.count(text) != 1:
            raise ValueError(f"{same[0]['file']} does not hold exactly once:\n{text}")
        if "MUTATED" in same[0]["fault"]:
            is_on = f"is_mutated({json.dumps(same[0]['name'])})"
            source = source.replace(text, same[0]["fault"].replace("MUTATED", is_on))
        else:
            source = source.replace(text, switched(text, same))
    return IS_ON + source


def switched(text: str, mutations: list[dict[str, str]]) -> str:
    """Merges the versions of a text: keeps their common beginning and end, chooses the rest at run time."""
    lines = text.splitlines()
    faults = [m["fault"].splitlines() for m in mutations]
    shortest = min(map(len, [lines, *faults]))
    head = next((i for i in range(shortest) if any(f[i] != lines[i] for f in faults)), shortest)
    tail = next(
        (i for i in range(shortest - head) if any(f[-1 - i] != lines[-1 - i] for f in faults)),
        shortest - head,
    )

    def middle(part: list[str]) -> str:
        return "\n".join(part[head : len(part) - tail])

    chosen = "".join(
        f"if (is_mutated({json.dumps(m['name'])})) {{\n{middle(fault)}\n}} else "
        for m, fault in zip(mutations, faults, strict=True)
    )
    return "\n".join([*lines[:head], f"{chosen}{{\n{middle(lines)}\n}}", *lines[len(lines) - tail :], ""])
