"""Checks whether a module can be computed from its weights instead of being called."""

from torch import nn

from kernels.backends.torch_private import module_hooks_active


def is_unmodified(module: nn.Module) -> bool:
    """Returns True if calling the module runs only its class's forward, without hooks or a `forward` set on the instance."""
    has_hooks = (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
                 or module_hooks_active())
    return "forward" not in module.__dict__ and not has_hooks
