"""A folder for each generation; states, losses, packed weights; fused/ and decoding/: what the forms of generations share."""
