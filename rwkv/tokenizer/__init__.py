"""Encodes text to token ids and decodes token ids to text."""
