"""Contains the dtypes that C kernels support, each with the suffix of the functions' names."""

import torch

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
