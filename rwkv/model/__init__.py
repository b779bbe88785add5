"""The models: a folder for each RWKV generation; states, losses, packed weights; fused/ and decoding/ for all generations."""
