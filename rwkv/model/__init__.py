"""The architectures: one file for each generation, their states and losses."""
