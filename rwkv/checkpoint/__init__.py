"""Reads and writes checkpoints: model weights in files of every supported format."""
