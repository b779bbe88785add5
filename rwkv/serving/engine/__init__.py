"""The engine in a process of its own: worker there; in the HTTP process remote, queue, and compiling of grammars."""
