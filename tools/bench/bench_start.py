"""Times `import funcol` and `funcol.install()` in fresh processes, after `import torch.distributed`.

Programs that use neither DTensor nor FSDP2 do not pay for them: install() imports no module of PyTorch's.
Modules are compiled to bytecode before, as an installation has them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from runner import Table, cell, each, mark, repeat, run, say, summary

LIMITS_MS = {"import funcol": 50.0, "funcol.install()": 60.0}

PROGRAM = """
import json, sys, time
begin = time.perf_counter()
import torch.distributed
torch_s = time.perf_counter() - begin
begin = time.perf_counter()
import funcol
import_s = time.perf_counter() - begin
before = set(sys.modules)
begin = time.perf_counter()
funcol.install()
install_s = time.perf_counter() - begin
new = [name for name in sys.modules if name not in before]
of_torch = [name for name in new if name.partition(".")[0] != "funcol"]
print(json.dumps({"torch": torch_s, "import funcol": import_s, "funcol.install()": install_s,
                  "modules": len(new), "not of funcol": of_torch}))
"""


def bench(repeat: int) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", PROGRAM]
    writes_bytecode = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

    def start() -> Any:
        done = subprocess.run(command, capture_output=True, check=True, env=writes_bytecode)
        return json.loads(done.stdout)

    start()
    return [start() for _ in each("processes", range(repeat))]


def print_processes(found: list[dict[str, Any]]) -> None:
    of_torch = statistics.median(process["torch"] for process in found)
    say(f"\nin ms, median (best) of {len(found)} fresh processes")
    say(f"import torch.distributed: {1e3 * of_torch:.0f}")
    for name, limit in LIMITS_MS.items():
        times = summary([1e3 * process[name] for process in found])
        ratio = statistics.median(process[name] / process["torch"] for process in found)
        say(
            f"{name:<18}{cell(times, 1)}, {ratio:.3f} of the import of torch.distributed; "
            f"limit {limit:.0f} {mark(times['median'] <= limit)}"
        )
    others = sorted({name for process in found for name in process["not of funcol"]})
    met = not [name for name in others if name.startswith("torch")]
    say(f"modules that install() imports: {found[0]['modules']}, none of PyTorch: {mark(met)}")
    say(f"  not of funcol: {', '.join(others) or 'none'}")


if __name__ == "__main__":
    table = Table("processes", lambda args: bench(args.repeat), print_processes)
    run(__doc__, [table], repeat(9, "processes"))
