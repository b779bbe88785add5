"""Text documents: sources and splits (source.py), separators in files (separators.py), and duplicates (copies.py)."""
