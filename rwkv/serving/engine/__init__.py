"""The engine in a process of its own: worker, which generates; remote, its side in the HTTP process; compiling of grammars."""
