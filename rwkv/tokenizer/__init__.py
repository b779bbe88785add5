"""Tokenizers: encode text to token ids, and decode ids to text."""
