"""Prints the plan of a run before training starts: for this machine, or for GPUs that this machine lacks."""
