"""Reads and writes files and streams, and handles signals: atomic writes, cache files, UTF-8, JSON lines, broken pipes."""
