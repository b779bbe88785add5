"""Files and streams: atomic writes, cache files, UTF-8, JSON lines, output streams that may be closed; signals."""
