"""Prints what a PyTorch release changes for funcol. tools/next_torch runs this in the release's environment.

python tools/next_torch.py --beside PYTHON --build-log FILE [--built]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 110
MAX_NAMES = 60  # of one list
MAX_IMPORTS = 12
MAX_ERRORS = 20  # of the compiler

Facts = dict[str, Any]  # of tools/torch_facts.py


def facts_of(python: str, beside: Facts | None = None) -> Facts:
    """Returns what tools/torch_facts.py collects in the environment of ``python``."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(beside or {}, file)
        file.flush()
        done = _run(python, str(ROOT / "tools" / "torch_facts.py"), file.name)
    try:
        facts: Facts = json.loads(done.stdout)
    except ValueError:
        return {"errors": {"PyTorch": _last_line(done.stderr) or f"exit status {done.returncode}"}}
    return facts


def _run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    # Isolated (-I): PYTHONPATH may name another build of funcol.
    return subprocess.run([python, "-I", *arguments], capture_output=True, text=True, check=False, cwd="/")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


# Sections: each function returns the lines of one


def _listed(title: str, names: Iterable[str], limit: int = MAX_NAMES) -> list[str]:
    """Returns the lines of a list of names; none for no names."""
    names = list(names)
    if not names:
        return []
    rest = [f"and {len(names) - limit} more"] if len(names) > limit else []
    text = f"{title} ({len(names)}): " + ", ".join([*names[:limit], *rest])
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


def _new_and_gone(new: Iterable[str], old: Iterable[str]) -> list[str]:
    new, old = list(new), list(old)
    lines = [
        *_listed("new", (name for name in new if name not in old)),
        *_listed("gone", (name for name in old if name not in new)),
    ]
    return lines or ["  nothing is new, nothing is gone"]


def _unknown(facts: Facts, *names: str) -> list[str]:
    """Returns a line for each part of the facts that could not be collected."""
    return [f"  {name}: not known, {facts['errors'][name]}" for name in names if name in facts["errors"]]


def functions_section(new: Facts, old: Facts | None) -> list[str]:
    """Returns the functions that ``install()`` replaces, by what became of their sources."""
    lines = _unknown(new, "fsdp2", "functions", "collectives", "missing_imports")
    fsdp2 = new.get("fsdp2")
    if fsdp2 is not None:
        count = len(fsdp2["replaced"])
        lines.append(f"  FSDP2: install() replaces {count} of {count + len(fsdp2['left'])} functions")
        lines += _listed("left to PyTorch", fsdp2["left"])
        bypassed = (name for name in fsdp2["unknown"] if name not in fsdp2["left"])
        lines += _listed("bypassed by replacements, and of unknown source", bypassed)
        lines += _listed("missing", fsdp2["missing"])
    for title, module in (("functional collectives", "_functional_collectives"), ("DTensor", "tensor")):
        lines += _compared(title, f"torch.distributed.{module}", new.get("functions", {}), old)
    if old is not None and "collectives" in new and "collectives" in old:
        fresh = [name for name in new["collectives"] if name not in old["collectives"]]
        lines += _listed("new functional collectives", fresh)
    missing = new.get("missing_imports", {})
    imports = (f"{name} ({places[0]})" for name, places in missing.items())
    return [*lines, *_listed("missing names that funcol imports", imports, MAX_IMPORTS)]


def _compared(title: str, module: str, new: dict[str, str | None], old: Facts | None) -> list[str]:
    found = {name: digest for name, digest in new.items() if name.startswith(module)}
    if not found:
        return []
    known = (old or {}).get("functions", found)
    short = {name: name.partition(":")[2] for name in found}
    missing = [name for name, digest in found.items() if digest is None]
    changed = [name for name in found if name not in missing and found[name] != known.get(name)]
    same = len(found) - len(missing) - len(changed)
    relation = f"have the source that they have in {old['version']}" if old else "exist"
    return [
        f"  {title}: {same} of {len(found)} functions {relation}",
        *_listed("of another source", (short[name] for name in changed)),
        *_listed("missing", (short[name] for name in missing)),
    ]


def keys_section(new: Facts, old: Facts | None) -> list[str]:
    """Returns the state of the wake key, and the keys that are new or gone."""
    lines = _unknown(new, "dispatch_keys", "wake_key")
    keys, wake = new.get("dispatch_keys"), new.get("wake_key")
    if keys is not None and wake is not None:
        lines.append(f"  wake key {wake['name']}: {_state_of_wake_key(keys, wake)}")
    if keys is not None and old is not None and "dispatch_keys" in old:
        lines += _new_and_gone(keys, old["dispatch_keys"])
    return lines


# Keys above the wake key in every supported release, and keys that stand for several others.
_OVER_WAKE_KEY = ("PythonTLSSnapshot", "PythonDispatcher", "Autograd", "Autocast")


def _state_of_wake_key(keys: list[str], wake: dict[str, Any]) -> str:
    if wake["name"] not in keys:
        return "gone; csrc/async/wake_key.h needs another"
    taken = ["a fallback"] if wake["has_fallback"] else []
    taken += [f"kernels of {', '.join(wake['kernels'][:5])}"] if wake["kernels"] else []
    if taken:
        return f"taken, PyTorch registers {' and '.join(taken)} for it"
    over = [
        key
        for key in keys[keys.index(wake["name"]) :]
        if key.startswith(("Autograd", "Autocast", "Python")) and key not in _OVER_WAKE_KEY
    ]
    return f"free, but below {', '.join(over)}" if over else "free, above Python, autograd and autocast"


def own_schemas() -> dict[str, str]:
    """Returns the schemas of funcol's operators, named as those of PyTorch."""
    source = (ROOT / "csrc" / "ops" / "schemas.cpp").read_text()
    schemas = {}
    for literals in re.findall(r'm\.def\(\s*((?:"[^"\n]*"\s*)+)', source):
        text = "".join(re.findall(r'"([^"]*)"', literals))
        schemas[f"_c10d_functional::{text.partition('(')[0]}"] = f"_c10d_functional::{text}"
    return schemas


def operators_section(new: Facts, old: Facts | None, own: dict[str, str]) -> list[str]:
    """Returns the operators that are new or gone, and the changes of schemas, compared with ``old``.

    Without ``old`` they are compared with funcol's schemas, ``own``.
    """
    lines = _unknown(new, "schemas")
    schemas = new.get("schemas")
    if schemas is None:
        return lines
    known = old["schemas"] if old is not None and "schemas" in old else own
    if known is own:
        schemas = {name: schema for name, schema in schemas.items() if name.startswith("_c10d_functional::")}

    def marked(name: str) -> str:
        has_own = name.replace("_autograd::", "::") in own
        return _short(name) if has_own else f"{_short(name)} (not in funcol)"

    lines += _new_and_gone(map(marked, schemas), map(marked, known))
    by_change: dict[str, list[str]] = {}
    for name in schemas:
        if name in known and schemas[name] != known[name]:
            by_change.setdefault(schema_changes(known[name], schemas[name]), []).append(_short(name))
    return [*lines, *(line for change, names in by_change.items() for line in _listed(change, names))]


def _short(operator: str) -> str:
    return operator.removeprefix("_c10d_functional::").removeprefix("_c10d_functional_")


def schema_changes(before: str, after: str) -> str:
    """Returns the arguments and results in which two schemas differ: "str group_name, not Any group_name"."""

    def parts(schema: str) -> list[str]:
        arguments, _, result = schema.partition("(")[2].rpartition(") -> ")
        return [f"-> {result}", *arguments.split(", ")]

    pairs = zip_longest(parts(before), parts(after), fillvalue="nothing")
    return "; ".join(f"{now}, not {then}" for then, now in pairs if then != now)


def members_section(new: Facts, old: Facts | None) -> list[str]:
    """Returns the members of c10d's classes that are new or gone."""
    lines = _unknown(new, "members")
    if old is None or "members" not in old or "members" not in new:
        return lines
    for name, members in new["members"].items():
        lines += [f"  {name}:", *_new_and_gone(members, old["members"][name])]
    return lines


_COMPILER_ERROR = re.compile(r"(?P<file>[^\s:][^:]*):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.+)")


def build_errors(log: str) -> list[str]:
    """Returns the first errors of a compiler's log, grouped by file; the log's last lines if it has none."""
    found = dict.fromkeys(
        (match["file"].replace(f"{ROOT}/", ""), int(match["line"]), match["text"])
        for match in map(_COMPILER_ERROR.match, log.splitlines())
        if match is not None
    )
    if not found:
        return [f"  {line.strip()[:WIDTH]}" for line in log.splitlines() if line.strip()][-5:]
    lines = []
    by_file: dict[str, list[str]] = {}
    for file, line, text in list(found)[:MAX_ERRORS]:
        by_file.setdefault(file, []).append(f"    {line}: {text}"[:WIDTH])
    for file, errors in by_file.items():
        lines += [f"  {file}", *errors]
    return lines if len(found) <= MAX_ERRORS else [*lines, f"  and {len(found) - MAX_ERRORS} more"]


def imported(python: str) -> tuple[bool, str]:
    """Returns true, and the line of ``install()``, if the funcol in the environment of ``python`` imports;
    else false and the reason."""
    done = _run(python, "-W", "ignore", "-c", "import funcol; funcol.install()")
    return done.returncode == 0, _last_line(done.stderr)


def report(new: Facts, old: Facts | None, own: dict[str, str]) -> list[str]:
    """Returns the lines of all sections that need no build."""
    beside = (
        f"beside {old['version']}"
        if old
        else "beside funcol's own tables, for there is no .venv (tools/setup)"
    )
    return [
        f"PyTorch {new.get('version', 'of unknown version')} {beside}",
        *_unknown(new, "PyTorch", "version"),
        *("", "Functions", *functions_section(new, old)),
        *("", "Dispatch keys", *keys_section(new, old)),
        *("", "Operators of _c10d_functional", *operators_section(new, old, own)),
        *("", "Members of c10d's classes", *members_section(new, old)),
    ]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--beside", required=True, help="the Python of a supported release; need not exist")
    parser.add_argument("--build-log", required=True, type=Path)
    parser.add_argument("--built", action="store_true", help="funcol was built and installed")
    options = parser.parse_args()
    old = facts_of(options.beside) if Path(options.beside).exists() else None
    if old is not None and "version" not in old:
        old = None
    new = facts_of(sys.executable, old)
    print(*report(new, old, own_schemas()), "", "Build", sep="\n")
    if not options.built:
        print(*build_errors(options.build_log.read_text(errors="replace")), sep="\n")
        print(f"  funcol does not build; the whole log is {options.build_log}")
        return 1
    does_import, line = imported(sys.executable)
    print("  funcol builds and imports" if does_import else "  funcol builds and does not import")
    if line:
        print(textwrap.fill(line, WIDTH, initial_indent="  ", subsequent_indent="    "))
    return 0 if does_import else 1


if __name__ == "__main__":
    sys.exit(main())
