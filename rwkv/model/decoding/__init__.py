"""Decoding steps for all generations: the whole model in one C call (c_step.py) or in one CUDA graph (triton_step.py)."""
