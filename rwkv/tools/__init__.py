"""Has the tools that run as `python -m rwkv.tools.NAME`."""
