"""None: the toy's kernel is its reference."""
