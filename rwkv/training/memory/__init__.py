"""The memory of a run: its estimate, what the machine has, and options that reduce it."""
