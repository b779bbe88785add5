"""A model for one token at a time: a block in PyTorch (rwkvN_step.py), and the whole in one call of C (c_step.py, csrc/)."""
