"""The dtypes of arrays in C, by the suffix of the functions that take them."""

import torch

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
