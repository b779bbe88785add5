"""Training: setup, task, optimisers, callbacks, resuming, planning and sweeps."""
