"""Operators with interchangeable implementations. The package depends on torch and the back ends, not on the package rwkv."""
