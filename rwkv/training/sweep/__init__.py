"""Sweeps: many runs, each in a process or a job of its own."""
