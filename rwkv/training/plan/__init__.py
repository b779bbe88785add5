"""The plan of a run, printed before training starts: for this machine, or for GPUs that this machine lacks."""
