"""data.streaming: rows read (streams.py), tokenised (encoding.py) and made into batches (lanes.py) while a run trains."""
