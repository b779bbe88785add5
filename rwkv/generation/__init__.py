"""Generation: the engine, prefill, decoding, sampling, stopping and saved states."""
