"""Saved states. client_states: in the HTTP process; store: their content, in the engine's process; folder: their files."""
