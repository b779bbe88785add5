"""The engine's process (worker), and what the HTTP process needs to use it: remote, queue and compiling (of grammars)."""
