"""What runs as `python -m rwkv.tools.NAME`."""
