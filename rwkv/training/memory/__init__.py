"""Estimates the memory of a run, compares it with the machine's free memory, and chooses options that need less memory."""
