"""Times `import funcol` and `funcol.install()` in fresh processes, after `import torch.distributed`.

Programs that use neither DTensor nor FSDP2 do not pay for them: install() imports no module of PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch
from measure import add_outcomes, conclude, describe, each, mark, say

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=9, metavar="N", help="processes (default %(default)s)")
    add_outcomes(parser)
    args = parser.parse_args()
    found = [
        json.loads(subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True).stdout)
        for _ in each("processes", list(range(args.repeat)))
    ]
    of_torch = statistics.median(process["torch"] for process in found)
    say(f"\nin ms, median (best) of {args.repeat} fresh processes")
    say(f"import torch.distributed: {1e3 * of_torch:.0f}")
    for name, limit in LIMITS_MS.items():
        times = [1e3 * process[name] for process in found]
        ratio = statistics.median(process[name] / process["torch"] for process in found)
        met = statistics.median(times) <= limit
        say(
            f"{name:<18}{statistics.median(times):7.1f} ({min(times):.1f}), {ratio:.3f} of the import of "
            f"torch.distributed; limit {limit:.0f} {mark(met)}"
        )
    others = sorted({name for process in found for name in process["not of funcol"]})
    met = not [name for name in others if name.startswith("torch")]
    say(f"modules that install() imports: {found[0]['modules']}, none of PyTorch: {mark(met)}")
    say(f"  not of funcol: {', '.join(others) or 'none'}")
    conclude({**describe(torch.device("cpu")), "processes": found}, args)


if __name__ == "__main__":
    main()
