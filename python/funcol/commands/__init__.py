"""The commands of ``python -m funcol``, one a module: what it adds to the parser, and what it prints."""
