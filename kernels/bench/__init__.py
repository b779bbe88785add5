"""Verify every implementation, then time it; tables, figures, and the check of a GPU."""
