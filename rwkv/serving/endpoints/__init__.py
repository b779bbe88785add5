"""The HTTP interfaces, a file for each: it translates requests for the engine, and the engine's events back."""
