"""The dtypes that the C kernels compute, as the names of their functions end."""

import torch

FORMS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
