"""The commands of ``python -m funcol``, one a module."""
