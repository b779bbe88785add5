"""Runs sweeps, which are many runs, each in a separate process or batch job."""
