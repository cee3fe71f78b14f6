"""Small parallel programs, each with faults that can be switched on one at a time."""
