"""A run's directory: made, opened, locked and resumed."""
