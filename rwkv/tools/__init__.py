"""Tools that run as `python -m rwkv.tools.NAME`."""
