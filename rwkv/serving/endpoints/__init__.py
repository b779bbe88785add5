"""The HTTP APIs, one file each. Each file translates requests for the engine, and the engine's events into answers."""
