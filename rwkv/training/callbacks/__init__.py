"""Defines the Lightning callbacks of a run, one file for each purpose."""
