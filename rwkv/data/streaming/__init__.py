"""Reads (streams.py), tokenises (encoding.py) and batches (lanes.py) documents during training, for data.streaming."""
