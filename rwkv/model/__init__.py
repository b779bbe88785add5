"""The architectures: one file for each generation, its fused form, states and losses; decoding/: one token at a time."""
