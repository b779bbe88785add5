"""Decoding steps: a block in PyTorch (rwkvN_step.py); a model in one C call (c_step.py) or one CUDA graph (triton_step.py)."""
