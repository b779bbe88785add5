"""Defines text documents: sources and splits (source.py), separators in files (separators.py), and copies (copies.py)."""
