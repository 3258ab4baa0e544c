"""Decide whether a caller's optimizer may step flat shards: it must be known or declared to be elementwise.

An elementwise update of an element depends on that element alone: its value, its gradient and its own state.
Such an optimizer may run on any piece of a parameter. Any other optimizer would silently compute different
numbers from pieces than from whole tensors. So an unknown class is refused until its caller declares it. If
every rank holds all parameters, every optimizer is accepted.

Invariant: a class that is accepted without a declaration is in `ELEMENTWISE_CLASSES`, or has whole tensors.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zerodrift.errors import UnsupportedError, first_of
from zerodrift.plan import Plan, Row

_log = logging.getLogger("zerodrift")

ELEMENTWISE_CLASSES: Mapping[str, tuple[str, ...]] = {
    "torch.optim": (
        *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD"),
        *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    ),
    "apex.optimizers": ("FusedAdagrad", "FusedAdam", "FusedSGD"),
    "bitsandbytes.optim": (
        *("Adagrad", "Adam", "AdamW", "Lion", "RMSprop", "SGD", "PagedAdam", "PagedAdamW", "PagedLion"),
        *("Adagrad32bit", "Adam32bit", "AdamW32bit", "Lion32bit", "RMSprop32bit", "SGD32bit"),
        *("PagedAdam32bit", "PagedAdamW32bit", "PagedLion32bit"),
    ),
    "deepspeed.ops": ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "FusedAdam", "FusedLion"),
    "lion_pytorch": ("Lion",),
    "transformers": ("AdamW",),
    "zerodrift.deepspeed.tools.optimizers": ("FusedLion",),
}
"""Package -> its elementwise classes. Subclasses do not count."""

BITSANDBYTES = {"optim_bits": 32, "percentile_clipping": 100}
"""Options that make the classes of `bitsandbytes` elementwise: with 8 bits, the size of a tensor decides."""

MATRIX_OPTIMIZERS = ("muon", "adafactor", "shampoo", "soap", "galore", "apollo", "lamb", "lars", "dion")
"""Words in the name of a class, of a base class or of its module that mean an update by whole tensors."""

_MARK = "_zerodrift_elementwise"

WHOLE = "`precision: {rules: [{match: '*', placement: whole}]}`"
DECLARE = (
    "Pass `elementwise=True` to `initialize` (in a config: `zero_allow_untested_optimizer: true`) if an "
    "element's update depends on that element alone"
)


def declare(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> None:
    """Record a caller's declaration of an optimizer; None declares nothing."""
    if elementwise is not None:
        setattr(optimizer, _MARK, elementwise)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool | None:
    """Return whether an optimizer is elementwise, or None if neither the table nor its caller knows."""
    kind = type(optimizer)
    if needs_whole_tensors(kind):
        return False
    options = getattr(optimizer, "args", None)
    if all(getattr(options, key, value) == value for key, value in BITSANDBYTES.items()):
        for package, names in ELEMENTWISE_CLASSES.items():
            if f"{kind.__module__}.".startswith(f"{package}.") and kind.__name__ in names:
                return True
    declared: bool | None = getattr(optimizer, _MARK, None)
    return declared


def needs_whole_tensors(kind: type) -> bool:
    """Return whether a class or one of its bases is an optimizer of matrices, by its name or its module's.

    `galore_torch.adamw` calls its class AdamW.
    """
    names = [base.__name__.lower() for base in kind.__mro__]
    modules = {part for base in kind.__mro__ for part in re.split(r"[._]", base.__module__)}
    return any(word in name for name in names for word in MATRIX_OPTIMIZERS) or bool(
        modules.intersection(MATRIX_OPTIMIZERS)
    )


def require_elementwise(optimizer: torch.optim.Optimizer, group_of: Mapping[str, int], plan: Plan) -> None:
    """Refuse an optimizer that may compute different numbers from the pieces on a rank of this plan."""
    rows = _trained_rows(group_of, plan)
    if plan.policy.pipeline is None and not any(row.parts > 1 or _is_cut(row, plan) for row in rows):
        return  # every rank has every parameter whole
    kind = type(optimizer).__name__
    elementwise = is_elementwise(optimizer)
    if elementwise is None:
        must = "must be known to be elementwise where ranks hold different parameters, or pieces of them"
        do = (
            f"{DECLARE}. Otherwise train at stage 0 without pipeline and experts; or, if it updates each "
            f"tensor independently, pass `elementwise=False` and place its parameters whole, with a rule "
            f"such as {WHOLE}."
        )
        raise UnsupportedError("optimizer", must, got=f"{kind}, which zerodrift does not know", do=do)
    if not elementwise:
        _require_whole(kind, rows, plan)
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        _warn_of_hooks(kind)


def require_for_dtensors(optimizer: torch.optim.Optimizer, group_of: Mapping[str, int], plan: Plan) -> None:
    """Refuse an optimizer of matrices, which would be wrong on DTensors. Norms of DTensors are global."""
    if needs_whole_tensors(type(optimizer)):
        _require_whole(type(optimizer).__name__, _trained_rows(group_of, plan), plan)


class RefuseNewData(TorchFunctionMode):
    """A context that refuses `p.data = ...`, which a DTensor loses."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._kind = type(optimizer).__name__

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == torch.Tensor.data.__set__ and isinstance(args[0], torch.nn.Parameter):  # type: ignore[attr-defined]
            must = "must write into its parameters, which are DTensors: an assignment to `p.data` is lost"
            do = "Write `p.copy_(...)` there, or use the native backend."
            raise UnsupportedError("optimizer", must, got=self._kind, do=do)
        return func(*args, **(kwargs or {}))


def _trained_rows(group_of: Mapping[str, int], plan: Plan) -> list[Row]:
    rows = (plan.row(name) for name in group_of)
    return [row for row in rows if row is not None and row.columns.update is not None]


def _is_cut(row: Row, plan: Plan) -> bool:
    """Return True if ranks update pieces of a row."""
    update = row.columns.update
    return update is not None and update.axis != "" and plan.slices(plan.segments[row.segment]) > 1


def _require_whole(kind: str, rows: Sequence[Row], plan: Plan) -> None:
    placed = {row.name for row in rows if row.columns.update and row.columns.update.placement == "whole"}
    cut = [row.name for row in rows if row.parts > 1 or (row.name not in placed and _is_cut(row, plan))]
    if cut:
        do = f"Place its parameters whole, with a rule such as {WHOLE}, train at stage 0, or use an "
        do += "elementwise optimizer."
        if any(row.parts > 1 for row in rows):
            do += " Experts that are divided over ranks need another optimizer."
        must = "must be elementwise where ranks hold flat pieces of parameters"
        raise UnsupportedError("optimizer", must, got=f"{kind}, and pieces of {first_of(cut, 3)}", do=do)


@functools.cache
def _warn_of_hooks(kind: str) -> None:
    _log.warning(
        "zerodrift: %s has step hooks, which see the shards of this rank instead of whole parameters. "
        "Stage 0, or a rule %s, gives them whole ones",
        kind,
        WHOLE,
    )
