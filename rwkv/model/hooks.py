"""Whether a module may be computed without being called."""

from torch import nn

from kernels.backends.torch_private import module_hooks_active


def untouched(module: nn.Module) -> bool:
    """Whether calling the module runs only its class's forward: it has no hook and no forward in the instance."""
    hooked = (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
              or module_hooks_active())
    return "forward" not in module.__dict__ and not hooked
