"""RWKV language models: a package for each generation, states, losses, packed weights, fused operations and decoding steps."""
