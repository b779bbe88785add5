"""A model for one token at a time: a block in PyTorch (rwkvN_step.py), and as part of one launch (rwkvN_program.py)."""
