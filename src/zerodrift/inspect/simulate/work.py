"""Count the work of a model in a micro-batch, unit by unit: products, bytes read and written, and activations
that autograd keeps.

One forward and backward runs without values (`inspect/trace/dry_run.py`), and every operation of it counts.
An operation takes as long as its products or its bytes, whichever is longer.

Invariant: counts do not depend on a cluster, a ZeRO stage or a number of ranks. The only exception is experts
that are divided over ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zerodrift.dtypes import DType, parse
from zerodrift.engine import tensors_in
from zerodrift.errors import ConfigError, ModelError, UnsupportedError
from zerodrift.inspect.trace import trace
from zerodrift.model import Inputs, inputs_for
from zerodrift.plan import Plan, Trace, TracedOperation, enclosing_modules


@dataclass(frozen=True, slots=True)
class CountedOperation:
    """Size of an operation, which is the key of a count of equal ones."""

    flops: int
    dtype: DType  # dtype of the products; fp32 without any
    bytes: int  # bytes that are read and written


OperationCounts = Mapping[CountedOperation, int]


@dataclass(frozen=True, slots=True)
class UnitWork:
    """Work of one unit in a micro-batch. The root has two: before its blocks and after them."""

    forward: tuple[OperationCounts, ...]
    """One part, or three if experts are divided over ranks: before, in, and after the experts."""
    backward: tuple[OperationCounts, ...]  # the same parts in the opposite order
    saved: int  # bytes that autograd keeps, without parameters
    entering: int  # bytes of the input activations, which recomputation keeps
    dispatched: int  # bytes of the tokens that travel to experts on other ranks
    combined: int  # bytes of the tokens that travel back

    @property
    def flops(self) -> int:
        """FLOPs of the products of the forward."""
        return sum(operation.flops * count for part in self.forward for operation, count in part.items())


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a whole model, for one micro-batch of one rank."""

    blocks: Mapping[str, UnitWork]
    enter: UnitWork
    leave: UnitWork
    tokens: int
    inputs: str  # description of the micro-batch
    products: DType  # dtype of most products

    @property
    def flops(self) -> int:
        """FLOPs of the products of a forward."""
        return sum(unit.flops for unit in (self.enter, *self.blocks.values(), self.leave))


MOST_TOKENS = 1 << 26  # most tokens of a micro-batch; more is likely a mistake


def count_work(plan: Plan, model: nn.Module, inputs: Inputs) -> Work:
    """Count the work of a micro-batch. The model cannot be used afterwards."""
    saved = _SavedTensors(plan, model)
    handles = list(saved.attach())
    try:
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            traced = trace(plan, model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if traced.refused is not None or not traced.loss:
        got = "an operation that torch refuses"
        if traced.refused is None:
            got = "no loss, nothing that it returns has a gradient"
        must, do = "must have a step that runs", "See `zerodrift plan --trace`."
        raise ModelError("--simulate", must, got=got, do=do)
    tensors = tensors_in((inputs.args, dict(inputs.kwargs)))
    whole = (tensor.numel() for tensor in tensors if not tensor.is_floating_point())
    samples = tensors[0].shape[0] if tensors and tensors[0].dim() else 1
    return _work(plan, traced, saved, next(whole, samples))


def sized_inputs(model: nn.Module, samples: int, length: int) -> Inputs:
    if samples * length > MOST_TOKENS:
        do = "Lower `train_micro_batch_size_per_gpu` or `--tokens`."
        got = f"{samples:,} samples of {length:,}"
        raise ConfigError("--simulate", f"must be of at most {MOST_TOKENS:,} tokens at once", got=got, do=do)
    example = inputs_for(model)
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(limit, int) and 0 < limit < length:
        raise ConfigError("--tokens", f"must be at most {limit:,}, the model's longest sample", got=length)
    made: dict[str, Any] = {}
    for name, value in example.kwargs.items():
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.int64 or value.dim() != 2:
            must = "must accept tokens as its only input"
            do = "Give `--inputs package.module:function`, which returns a micro-batch."
            raise UnsupportedError(type(model).__name__, must, got=f"`{name}`", do=do)
        repeated = value.reshape(-1).repeat(-(-samples * length // value.numel()))
        made[name] = repeated[: samples * length].view(samples, length)
    return Inputs((), made, f"{samples} x {length:,} tokens")


class _SavedTensors:
    """Hooks that count the bytes that autograd saves, and those of the inputs of units."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._model = model
        self._names = [unit.name for unit in plan.units if unit.name]
        self._running: list[str] = []
        self._block_ran = False
        self._parameters: set[int] | None = None
        self._seen: dict[int, Any] = {}  # storages by address, kept alive so that no address is used twice
        self.saved: Counter[str] = Counter()
        self.entering: Counter[str] = Counter()

    def attach(self) -> Iterator[Any]:
        modules = dict(self._model.named_modules())
        for name in self._names:
            module = modules.get(name)
            if module is None:
                must, do = "must be a module of the model, as planned", "Leave adapters (`model.lora`) out."
                raise ModelError(name, must, got="no such module", do=do)
            enter = functools.partial(self._enter, name)
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(self._leave, always_call=True)

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._block_ran = True
        self._running.append(name)
        inputs = (tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad)
        self.entering[name] += sum(tensor.numel() * tensor.itemsize for tensor in inputs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._parameters is None:
            self._parameters = {parameter.untyped_storage()._cdata for parameter in self._model.parameters()}
        storage: Any = tensor.untyped_storage()
        if storage._cdata not in self._parameters and storage._cdata not in self._seen:
            self._seen[storage._cdata] = storage
            place = self._running[-1] if self._running else ("leave" if self._block_ran else "enter")
            self.saved[place] += storage.nbytes()
        return tensor


def _work(plan: Plan, traced: Trace, saved: _SavedTensors, tokens: int) -> Work:
    names = [unit.name for unit in plan.units if unit.name]
    parts = {row.name: row.parts for row in plan.rows if row.parts > 1}
    divided = {memory: parts[name] for memory, name in traced.parameters.items() if name in parts}
    operations: dict[tuple[str, bool], list[TracedOperation]] = defaultdict(list)
    products: Counter[DType] = Counter()
    for place, operation in _places(names, traced.operations):
        operations[place, operation.backward].append(operation)
        if operation.flops:
            products[_dtype(operation)] += operation.flops

    def unit(place: str) -> UnitWork:
        forward = operations[place, False]
        experts = [each for each in forward if _uses_experts(each, divided)]
        given = [tensor for each in experts[:1] for tensor in each.inputs if tensor.memory not in divided]
        made = [tensor for each in experts[-1:] for tensor in each.outputs]
        dispatched, combined = (max((each.bytes for each in rows), default=0) for rows in (given, made))
        backward = _split_at_experts(operations[place, True], divided)
        memory = saved.saved[place], saved.entering[place]
        return UnitWork(_split_at_experts(forward, divided), backward, *memory, dispatched, combined)

    most = products.most_common(1)[0][0] if products else DType.FP32
    blocks = {name: unit(name) for name in names}
    return Work(blocks, unit("enter"), unit("leave"), tokens, traced.inputs, most)


def _places(
    names: Sequence[str], operations: Sequence[TracedOperation]
) -> Iterator[tuple[str, TracedOperation]]:
    """Yield each operation with its block. Operations of the root have `enter` before the blocks and `leave`
    after them.

    A backward operation of the root goes with the forward operations of its module. If that module runs on
    both sides of the blocks, the operation is in `leave` until the backward of a block has run.
    """
    units = set(names)

    @functools.cache
    def block(path: str) -> str:
        return next((module for module in enclosing_modules(f"{path}.") if module in units), "")

    sides: dict[str, set[str]] = defaultdict(set)  # module of the root -> places of its forward operations
    forward, backward = "enter", "leave"
    for operation in operations:
        if name := block(operation.module):
            forward, place = "leave", name
            backward = "enter" if operation.backward else backward
        elif operation.backward:
            found = sides[operation.module]
            place = next(iter(found)) if len(found) == 1 else backward
        else:
            place = forward
            sides[operation.module].add(place)
        yield place, operation


def _counted(operation: TracedOperation, divided: Mapping[int, int]) -> CountedOperation:
    moved = sum(tensor.bytes // divided.get(tensor.memory, 1) for tensor in operation.inputs)
    for tensor in operation.outputs:
        # The gradient of stacked experts is as large as the stack.
        stacked = operation.backward and operation.name == "_grouped_mm" and tensor.dims == 3
        moved += tensor.bytes // (max(divided.values(), default=1) if stacked else 1)
    return CountedOperation(operation.flops, _dtype(operation), moved)


def _dtype(operation: TracedOperation) -> DType:
    known = [tensor.dtype for tensor in operation.inputs if tensor.dtype in _MULTIPLIED]
    return parse(min(known, key=_MULTIPLIED.index, default="fp32")) if operation.flops else DType.FP32


_MULTIPLIED = ("fp8_e4m3", "bf16", "fp16", "fp32")  # dtypes of operands; the scales of fp8 operands are fp32


def _split_at_experts(
    operations: Sequence[TracedOperation], divided: Mapping[int, int]
) -> tuple[OperationCounts, ...]:
    """Count the operations before the divided experts, in them, and after them."""
    own = [place for place, operation in enumerate(operations) if _uses_experts(operation, divided)]
    bounds = (0, *((own[0], own[-1] + 1) if own else ()), len(operations))
    return tuple(
        Counter(_counted(operation, divided) for operation in operations[start:stop])
        for start, stop in itertools.pairwise(bounds)
    )


def _uses_experts(operation: TracedOperation, divided: Mapping[int, int]) -> bool:
    return bool(operation.flops) and any(tensor.memory in divided for tensor in operation.inputs)
