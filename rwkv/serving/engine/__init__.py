"""The engine's process (worker), and the code with which the HTTP process uses it (remote, queue, compiling)."""
