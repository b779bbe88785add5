"""Documents of text: their sources and splits (source.py), separators between them, and copies of them."""
