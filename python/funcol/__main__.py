"""``python -m funcol``: what is installed, plans of redistributions, costs of a mesh, profiles."""

from __future__ import annotations

import argparse

from .commands import calibrate, info, plan, trace


def main(arguments: list[str] | None = None) -> None:
    """Runs the command that ``arguments`` name; those of the process if there are none."""
    parser = argparse.ArgumentParser(prog="python -m funcol", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (info, plan, calibrate, trace):
        command.add_to(commands)
    chosen = parser.parse_args(arguments)
    try:
        chosen.run(chosen)
    except (ValueError, OSError) as error:
        parser.exit(2, f"python -m funcol {chosen.command}: {error}\n")


if __name__ == "__main__":
    main()
