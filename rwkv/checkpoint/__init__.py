"""Checkpoints: reads and writes weights in files of every format."""
