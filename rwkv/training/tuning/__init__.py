"""Tunes the weights of init_from= with tune=full|lora|state."""
