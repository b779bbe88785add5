"""Whether a module may be computed without being called."""

from torch import nn
from torch.nn.modules.module import _has_any_global_hook


def untouched(module: nn.Module) -> bool:
    """Whether calling the module runs its class's forward and nothing else: it has no hook and no forward of its own."""
    hooked = (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
              or _has_any_global_hook())
    return "forward" not in module.__dict__ and not hooked
