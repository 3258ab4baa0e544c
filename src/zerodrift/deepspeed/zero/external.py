"""`zero.register_external_parameter`: a parameter that another module than its owner computes with.

Nothing depends on it: whoever computes with a parameter of another unit has that unit gathered on the spot.
So a registration is remembered, and that is all.
"""

from __future__ import annotations

from torch import nn

EXTERNAL = "_zerodrift_external"
"""The attribute of a module with the parameters that it uses of others."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """`module` uses `parameter` in its forward."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    held = module.__dict__.setdefault(EXTERNAL, [])
    if not any(other is parameter for other in held):
        held.append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Forget it."""
    held = module.__dict__.get(EXTERNAL, [])
    module.__dict__[EXTERNAL] = [other for other in held if other is not parameter]
