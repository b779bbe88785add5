"""Contains operators with interchangeable implementations. This package depends on torch and the back ends, but not on rwkv."""
