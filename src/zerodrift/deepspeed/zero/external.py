"""`zero.register_external_parameter`: a parameter that another module than its owner computes with.

A parameter is gathered with its unit. The root's are there for a whole step, and a unit's for everything
inside it; for anybody else the parameter is not there. So a registration is remembered, and judged when the
engine is made, where it costs an error and not a NaN.
"""

from __future__ import annotations

from torch import nn

from zerodrift.deepspeed.parameters import engine_parameter
from zerodrift.engine.engine import Engine
from zerodrift.engine.native import native
from zerodrift.errors import Problems, UnsupportedError

EXTERNAL = "_zerodrift_external"
"""The attribute of a module with the parameters that it uses of others."""


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """`module` uses `parameter` in its forward."""
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    held = module.__dict__.setdefault(EXTERNAL, [])
    if not any(other is parameter for other in held):
        held.append(parameter)
    owner = engine_parameter(parameter)
    if owner is not None:
        check(owner.running())


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Forget it."""
    held = module.__dict__.get(EXTERNAL, [])
    module.__dict__[EXTERNAL] = [other for other in held if other is not parameter]


def check(engine: Engine) -> None:
    """Every registered parameter is there when its module runs."""
    parameters = {id(p): name for name, p in engine.module.named_parameters()}
    problems = Problems()
    for path, module in engine.module.named_modules():
        for parameter in module.__dict__.get(EXTERNAL, ()):
            row = engine.plan.row(parameters.get(id(parameter), ""))
            if row is None or not native(engine.executor).segments[row.segment].sharded:
                continue
            unit = engine.plan.units[row.unit].name
            if unit and path != unit and not path.startswith(f"{unit}."):
                problems.add(
                    row.name,
                    f"must be gathered when `{path or 'model'}` uses it",
                    got=f"unit `{unit}`, which is not around it",
                    do="Name a module around both in `sharding.units`.",
                )
    problems.raise_as(UnsupportedError)
