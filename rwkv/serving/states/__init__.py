"""Saved states. client_states: their records, in the HTTP process; store: their content, in the engine's process; folder: their
files."""
