"""Times moves of whole models' weights, PyTorch's (stock) and funcol's. See docs/performance.md.

Each table is a module: what it measures is there.
"""

from __future__ import annotations

import weights_export
import weights_meshes
import weights_owners
import weights_sync
from runner import Table, repeat, run

# Each has bench(repeat), which returns records, and report(records), which prints them.
MODULES = {"export": weights_export, "owners": weights_owners, "meshes": weights_meshes, "sync": weights_sync}


def table(name: str) -> Table:
    module = MODULES[name]
    return Table(name, lambda args: module.bench(args.repeat), module.report)


if __name__ == "__main__":
    run(__doc__, list(map(table, MODULES)), repeat(7), about="about", chooses=True)
