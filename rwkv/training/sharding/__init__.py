"""trainer=fsdp: the strategy that shards the weights, and its checkpoints."""
