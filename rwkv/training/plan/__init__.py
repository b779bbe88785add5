"""The plan of a run, printed before it starts: on this machine, or on GPUs that it lacks."""
