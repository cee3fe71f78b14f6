"""Times moves of whole models' weights, PyTorch's (stock) and funcol's. See docs/performance.md.

Each table is a module: what it measures is there.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import weights_export
import weights_meshes
import weights_owners
import weights_sync
from measure import add_outcomes, conclude, describe

# Each has bench(repeat), which returns records, and report(records), which prints them.
TABLES = {"export": weights_export, "owners": weights_owners, "meshes": weights_meshes, "sync": weights_sync}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_outcomes(parser)
    parser.add_argument("--repeat", type=int, default=7, help="rounds (default: 7)")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    results: dict[str, Any] = {"about": describe(torch.device("cpu"))}
    for name in options.tables:
        results[name] = TABLES[name].bench(options.repeat)
        TABLES[name].report(results[name])
    conclude(results, options)


if __name__ == "__main__":
    main()
