"""What belongs to runs that tune the weights of another, init_from=: tune=full|lora|state."""
