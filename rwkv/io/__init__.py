"""Files, streams and signals: atomic writes, cache files, UTF-8, JSON lines, output streams whose reader may disappear."""
