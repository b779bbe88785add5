"""data.streaming: rows are read (streams.py), tokenised (encoding.py) and made into batches (lanes.py) during training."""
