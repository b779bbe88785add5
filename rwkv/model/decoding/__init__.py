"""What the decoding steps of all generations share: a model in one C call (c_step.py) or one CUDA graph (triton_step.py)."""
