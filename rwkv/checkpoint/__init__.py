"""Checkpoints: weights in and out of files of every format."""
