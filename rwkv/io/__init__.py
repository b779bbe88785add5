"""Files and streams: atomic writes, cache files, UTF-8, lines of JSON, streams that nobody reads, signals."""
