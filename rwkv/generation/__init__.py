"""Generates text with a model: the engine, prefill, decoding, sampling, stopping and saved states."""
