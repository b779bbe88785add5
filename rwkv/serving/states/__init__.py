"""Clients' saved states: client_states in the HTTP process, store in the engine's process, and folder_lock for their files."""
