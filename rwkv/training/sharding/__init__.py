"""Implements trainer=fsdp: the strategy that shards the weights, and the sharded checkpoints."""
