"""How much a model computes in a micro-batch, unit by unit: products, bytes that pass through memory, and
what autograd keeps.

A forward and a backward run once without values (`inspect/trace/dry_run.py`), so casts, attention and losses
are counted as they are called. Each operation is later as fast as its products or its bytes allow, whichever
takes longer.

Invariant: nothing here depends on a cluster, a stage or a number of ranks, but for the experts that ranks
divide.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerodrift.dtypes import DType, parse
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.model.inputs import Inputs, inputs_for
from zerodrift.plan.table import Plan
from zerodrift.plan.traced import Trace, TracedOperation

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True, slots=True)
class CountedOperation:
    """Operations that are alike."""

    flops: int
    dtype: DType
    """That the products are of; fp32 where there are none."""
    bytes: int
    """Read and written."""


Operations = Mapping[CountedOperation, int]
"""CountedOperation -> how often."""


@dataclass(frozen=True, slots=True)
class UnitWork:
    """What one unit computes in a micro-batch; of the root, what comes before its blocks or behind them."""

    forward: tuple[Operations, ...]
    """In three parts where ranks divide its experts: before what goes there, what they do, and behind what
    comes back; else in one."""
    backward: tuple[Operations, ...]
    """In the same parts, the last of a forward first."""
    saved: int
    """Bytes that autograd keeps of its forward, parameters not among them."""
    entering: int
    """Bytes of the activations that it is called with: what is kept where the rest is computed again."""
    dispatched: int
    """Bytes of the rows that its experts are given, where ranks divide them: what travels there, and as much
    of their gradient in the backward."""
    combined: int
    """Bytes of the rows that come back."""

    @property
    def flops(self) -> int:
        """Of the forward."""
        return sum(operation.flops * count for part in self.forward for operation, count in part.items())


@dataclass(frozen=True, slots=True)
class Work:
    """Of a whole model, for one micro-batch of one rank."""

    blocks: Mapping[str, UnitWork]
    """By the name of the unit."""
    enter: UnitWork
    leave: UnitWork
    tokens: int
    inputs: str
    """What the model was called with, in words."""
    products: DType
    """What most products are of."""

    @property
    def flops(self) -> int:
        """Of a forward."""
        return sum(unit.flops for unit in (self.enter, *self.blocks.values(), self.leave))


MOST_TOKENS = 1 << 26
"""Of a micro-batch: more is a mistake, and takes memory to make."""


def work_of(plan: Plan, model: nn.Module, given: Inputs) -> Work:
    """Count what a micro-batch computes. The model is used up."""
    import torch

    from zerodrift.inspect.trace.dry_run import trace

    kept = _Kept(plan, model)
    handles = list(kept.attach())
    try:
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            seen = trace(plan, model, given)
    finally:
        for handle in handles:
            handle.remove()
    if seen.refused is not None or not seen.loss:
        got = (
            "no loss, nothing that it returns has a gradient"
            if seen.refused is None
            else "an operation that torch refuses"
        )
        raise ModelError(
            "--simulate", "must have a step that runs", got=got, do="See `zerodrift plan --trace`."
        )
    return _counted(plan, seen, kept, _tokens(given))


def sized(model: nn.Module, samples: int, length: int) -> Inputs:
    """Example inputs of so many samples and tokens."""
    import torch

    if samples * length > MOST_TOKENS:
        do = "Lower `train_micro_batch_size_per_gpu` or `--tokens`."
        got = f"{samples:,} samples of {length:,}"
        raise ConfigError("--simulate", f"must be of at most {MOST_TOKENS:,} tokens at once", got=got, do=do)
    small = inputs_for(model)
    found: dict[str, Any] = {}
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length:
        raise ConfigError("--tokens", f"must be at most {limit:,}, the model's longest sample", got=length)
    for name, value in small.kwargs.items():
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.int64 or value.dim() != 2:
            raise UnsupportedError(
                type(model).__name__,
                "must be called with tokens alone, to be given some",
                got=f"`{name}`",
                do="Give `--inputs package.module:function`, which returns a micro-batch.",
            )
        few = value.reshape(-1)
        found[name] = few.repeat(-(-samples * length // few.numel()))[: samples * length].view(
            samples, length
        )
    return Inputs((), found, f"{samples} x {length:,} tokens")


# --- what is kept ---------------------------------------------------------------------------------------


class _Kept:
    """Watches a forward: what autograd saves, and what units are called with."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = model
        self._names = [unit.name for unit in plan.units if unit.name]
        self._modules = dict(model.named_modules())
        self._under_way: list[str] = []
        self._came = False
        """Whether a block has run."""
        self._parameters: set[int] | None = None
        self._seen: set[int] = set()
        self._held: list[Any] = []
        self.saved: Counter[str] = Counter()
        self.entering: Counter[str] = Counter()

    def attach(self) -> Iterator[Any]:
        for name in self._names:
            module = self._modules.get(name)
            if module is None:
                must, do = "must be a module of the model, as planned", "Leave adapters (`model.lora`) out."
                raise ModelError(name, must, got="no such module", do=do)
            yield module.register_forward_pre_hook(self._begins(name), with_kwargs=True)
            yield module.register_forward_hook(self._ends, always_call=True)

    def _begins(self, name: str) -> Callable[..., None]:
        def begins(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._came = True
            self._under_way.append(name)
            self.entering[name] += sum(
                tensor.numel() * tensor.itemsize
                for tensor in _tensors((args, kwargs))
                if tensor.requires_grad
            )

        return begins

    def _ends(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._under_way:
            self._under_way.pop()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._parameters is None:
            self._parameters = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        storage: Any = tensor.untyped_storage()
        if storage._cdata not in self._parameters and storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(storage)  # so that no number comes again
            place = self._under_way[-1] if self._under_way else ("leave" if self._came else "enter")
            self.saved[place] += storage.nbytes()
        return tensor


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    from zerodrift.engine.nested import tensors_in

    return iter(tensors_in(values))


def _tokens(given: Inputs) -> int:
    """Of a micro-batch: elements of its first tensor of whole numbers, or samples where there is none."""
    tensors = list(_tensors((given.args, dict(given.kwargs))))
    whole = [tensor.numel() for tensor in tensors if not tensor.is_floating_point()]
    return next(iter(whole), tensors[0].shape[0] if tensors and tensors[0].dim() else 1)


# --- what is computed -------------------------------------------------------------------------------------


def _counted(plan: Plan, seen: Trace, kept: _Kept, tokens: int) -> Work:
    names = {unit.name for unit in plan.units if unit.name}
    places = _Places(names, seen)
    parts = {row.name: row.parts for row in plan.rows if row.parts > 1}
    divided = {memory: parts[name] for memory, name in seen.parameters.items() if name in parts}
    forward: dict[str, list[TracedOperation]] = defaultdict(list)
    backward: dict[str, list[TracedOperation]] = defaultdict(list)
    for place, operation in places.of(seen.operations):
        (backward if operation.backward else forward)[place].append(operation)

    def unit(place: str) -> UnitWork:
        dispatched, combined = _exchanged(forward[place], divided)
        return UnitWork(
            _parted(forward[place], divided),
            _parted(backward[place], divided),
            kept.saved[place],
            kept.entering[place],
            dispatched,
            combined,
        )

    products: Counter[DType] = Counter()
    for operation in seen.operations:
        if operation.flops:
            products[_dtype(operation)] += operation.flops
    most = products.most_common(1)[0][0] if products else DType.FP32
    blocks = {unit_.name: unit(unit_.name) for unit_ in plan.units if unit_.name}
    return Work(blocks, unit("enter"), unit("leave"), tokens, seen.inputs, most)


class _Places:
    """Which unit an operation is of; of the root, whether it comes before the blocks or behind them."""

    def __init__(self, names: Iterable[str], seen: Trace) -> None:
        self._names = set(names)
        self._known: dict[str, str] = {}
        self._enters: set[str] = set()
        came = False
        for operation in seen.operations:
            if not operation.backward:
                block = self._block(operation.module)
                came = came or bool(block)
                if not block and not came:
                    self._enters.add(operation.module)
        self._leaves = {
            operation.module
            for operation, after in _after_blocks(seen.operations, self._block)
            if after and not operation.backward
        }

    def _block(self, path: str) -> str:
        if path not in self._known:
            parts = path.split(".")
            prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
            self._known[path] = next((prefix for prefix in prefixes if prefix in self._names), "")
        return self._known[path]

    def of(self, operations: Sequence[TracedOperation]) -> Iterator[tuple[str, TracedOperation]]:
        back = False
        for operation, after in _after_blocks(operations, self._block):
            block = self._block(operation.module)
            if block:
                back = back or operation.backward
                yield block, operation
            elif not operation.backward:
                yield "leave" if after else "enter", operation
            elif operation.module in self._enters and operation.module not in self._leaves:
                yield "enter", operation
            elif operation.module in self._leaves and operation.module not in self._enters:
                yield "leave", operation
            else:
                yield "enter" if back else "leave", operation


def _after_blocks(
    operations: Iterable[TracedOperation], block: Callable[[str], str]
) -> Iterator[tuple[TracedOperation, bool]]:
    """Operations, and whether a block has run before each."""
    came = False
    for operation in operations:
        came = came or bool(block(operation.module))
        yield operation, came


def _operation(operation: TracedOperation, divided: Mapping[int, int]) -> CountedOperation:
    moved = 0
    for tensor in operation.inputs:
        moved += tensor.bytes // divided.get(tensor.memory, 1)
    for tensor in operation.outputs:
        # The gradient of a stack of experts is as large as the stack.
        stacked = operation.backward and operation.name == "_grouped_mm" and tensor.dims == 3
        moved += tensor.bytes // (max(divided.values(), default=1) if stacked else 1)
    return CountedOperation(operation.flops, _dtype(operation), moved)


def _dtype(operation: TracedOperation) -> DType:
    if not operation.flops:
        return DType.FP32
    known = ("fp32", "bf16", "fp16")
    return next((parse(tensor.dtype) for tensor in operation.inputs if tensor.dtype in known), DType.FP32)


def _parted(operations: Sequence[TracedOperation], divided: Mapping[int, int]) -> tuple[Operations, ...]:
    """Before the experts that ranks divide, theirs, and what comes after."""
    own = [place for place, operation in enumerate(operations) if _is_of_experts(operation, divided)]
    ends = (own[0], own[-1] + 1) if own else ()
    bounds = (0, *ends, len(operations))
    return tuple(
        Counter(_operation(operation, divided) for operation in operations[start:stop])
        for start, stop in itertools.pairwise(bounds)
    )


def _is_of_experts(operation: TracedOperation, divided: Mapping[int, int]) -> bool:
    return bool(operation.flops) and any(tensor.memory in divided for tensor in operation.inputs)


def _exchanged(operations: Sequence[TracedOperation], divided: Mapping[int, int]) -> tuple[int, int]:
    """Bytes of the rows that go into the experts of a unit, and come out."""
    own = [operation for operation in operations if _is_of_experts(operation, divided)]
    if not own:
        return 0, 0
    rows = [tensor.bytes for tensor in own[0].inputs if tensor.memory not in divided]
    return max(rows, default=0), max((tensor.bytes for tensor in own[-1].outputs), default=0)
