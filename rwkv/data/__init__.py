"""Training data: sources, preparation, shards, windows, documents and loaders."""
