"""Runs that tune the weights of init_from=: tune=full|lora|state."""
