"""Sweeps: many runs, each in its own process or batch job."""
