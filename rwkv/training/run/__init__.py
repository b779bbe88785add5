"""A run's directory: creating, opening, locking and resuming it."""
