"""Form weight gradients later: a queue that a stage owns, which backwards fill and the stage drains.

A backward needs the gradient of its input at once, because the stage before it is waiting, and that of its
weights only by the end of the step. So the products of a module (`products.py`) leave the second half in a
`WeightQueue`, and `drain` forms it, micro-batch by micro-batch, in the dtype of accumulation.

Invariant: every gradient in the queue is added to `param.grad` exactly once, or dropped by `clear`. Its
factors are as they were when the gradient was queued.

[Note: hooks] A hook on a weight, or on a view of one, reads or changes the weight's gradient. So autograd
forms that gradient at once: `recognise` looks for hooks in the forward, the product's backward looks again.
Hooks on nodes of the graph are not noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from zerodrift.engine import native
from zerodrift.errors import ModelError
from zerodrift.pipeline.products import (
    MatrixProduct,
    StridedView,
    asked,
    hooked,
    input_gradient,
    recognise,
    weight_gradient,
)

if TYPE_CHECKING:
    from zerodrift.engine import Engine, Gradients


@dataclass(frozen=True, slots=True)
class DeferredGradient:
    """One weight gradient that is to be formed."""

    parameter: nn.Parameter
    place: StridedView | None
    """Place in the parameter; None for all of it."""
    form: Callable[[torch.dtype], torch.Tensor]
    holds: tuple[tuple[torch.Tensor, int], ...]
    """(factor, its version when it was queued)."""
    held: int


class WeightQueue:
    """The weight gradients of one stage that are still to be formed, oldest first.

    `limit` bounds the bytes of activations and gradients that the queue keeps alive: when one more gradient
    would exceed it, the oldest are formed at once. Without a limit the queue holds the input and the output
    gradient of every deferred product, for each micro-batch that waits.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.held = 0
        self._waiting: list[list[DeferredGradient]] = [[]]
        """By micro-batch; the last one has not ended."""
        self._gradients: Gradients | None = None
        """Gradients of the engine that the module belongs to."""
        self._scheduled = False
        """Whether a schedule's backwards end micro-batches; else the engine does, where there is one."""
        self._handles: list[Any] = []
        self._owners: list[nn.Module] = []
        self._names: dict[torch.Tensor, str] = {}

    def __len__(self) -> int:
        """Return the number of weight gradients that wait."""
        return sum(map(len, self._waiting))

    def __bool__(self) -> bool:
        return True

    def put(
        self,
        parameter: nn.Parameter,
        form: Callable[[torch.dtype], torch.Tensor],
        holds: tuple[torch.Tensor, ...] = (),
        place: StridedView | None = None,
    ) -> None:
        """Queue a gradient in the backward of an autograd function of your own, which then returns None for
        the weight. `form(dtype)` returns the gradient later, in that dtype. `holds` are its factors, which
        count for the bound and must not be written to before."""
        self._require_known(parameter, form)
        kept = tuple((tensor, tensor._version) for tensor in holds)
        late = DeferredGradient(parameter, place, form, kept, sum(tensor.nbytes for tensor in holds))
        if self.limit is not None:
            while self.held + late.held > self.limit and len(self):
                self._form(next(filter(None, self._waiting)).pop(0))
        self._waiting[-1].append(late)
        self.held += late.held

    def _require_known(self, parameter: nn.Parameter, form: Any) -> None:
        must, got = "must be given a parameter that is trained", ""
        if not isinstance(parameter, torch.Tensor):
            got = type(parameter).__name__
        elif not parameter.is_leaf:
            got = "the result of an operation"
        elif not parameter.requires_grad:
            got = f"{self._name(parameter)}, frozen"
        elif self._gradients is not None and parameter not in self._names:
            must = "must be given a parameter of the model that the queue belongs to"
            got = f"a tensor {list(parameter.shape)} of another, whose gradient nobody would reduce"
        if got:
            raise ModelError("put", must, got=got)
        if not callable(form):
            must, got = "must come with a function that forms its gradient, of a dtype", type(form).__name__
            raise ModelError(self._name(parameter), must, got=got, do="Write `lambda dtype: ...`.")

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(parameter) or f"parameter {list(parameter.shape)}"

    def end_micro_batch(self) -> None:
        """End a micro-batch: the gradients queued since the last call are its own. An engine calls this."""
        self._waiting.append([])

    def drain(self) -> int:
        """Form what waits, oldest first. Returns the number of gradients."""
        count = len(self)
        for waiting in self._waiting:
            self._form_all(waiting)
        self._waiting = [[]]
        return count

    def clear(self) -> int:
        """Drop what waits, of a step that failed or a backward that was only run to learn shapes."""
        dropped = len(self)
        self._waiting, self.held = [[]], 0
        return dropped

    def dw_builder(self) -> Callable[[], None]:
        """End a micro-batch's backward, and return what its W action calls: the `dw_builder` of a stage of
        `torch.distributed.pipelining`."""
        if self._gradients is None or self._scheduled:
            self.end_micro_batch()
        mine = self._waiting[-2] if len(self._waiting) > 1 else []
        return lambda: self._form_all(mine)

    def detach(self) -> None:
        """Form what waits, and let the module's backwards form weight gradients again."""
        self.drain()
        for handle in self._handles:
            handle.remove()
        for owner in self._owners:
            object.__delattr__(owner, _MARK)
        self._handles, self._owners = [], []
        if self._gradients is not None and not self._scheduled:
            self._gradients.late = None
        self._gradients = None

    def _form_all(self, waiting: list[DeferredGradient]) -> None:
        if waiting and self._gradients is not None:
            self._gradients.open()
        while waiting:
            self._form(waiting.pop(0))

    def _form(self, late: DeferredGradient) -> None:
        with torch.no_grad():
            self._add(late)
        if self._gradients is not None:
            self._gradients.arrive_late(late.parameter)

    def _add(self, late: DeferredGradient) -> None:
        parameter = late.parameter
        dtype = parameter.grad_dtype or parameter.dtype
        self.held -= late.held
        for tensor, version in late.holds:
            if tensor._version != version:
                must = "the inputs of its late gradient must not be written before it is computed"
                times = f"{tensor._version - version} times after its backward"
                got = f"a tensor {list(tensor.shape)} that was written to in place {times}"
                do = "Call `drain()` first, or write to a clone."
                raise ModelError(self._name(parameter), must, got=got, do=do)
        value = late.form(dtype)
        shape = tuple(parameter.shape) if late.place is None else late.place.size
        made = isinstance(value, torch.Tensor)
        if not made or (tuple(value.shape), value.dtype, value.device) != (shape, dtype, parameter.device):
            must = f"must get a late gradient {list(shape)} {dtype} on {parameter.device}"
            got = f"{list(value.shape)} {value.dtype} on {value.device}" if made else type(value).__name__
            do = "`form(dtype)` returns a tensor of the dtype that it is called with."
            raise ModelError(self._name(parameter), must, got=got, do=do)
        covers = shape == tuple(parameter.shape)
        is_first = parameter.grad is None
        if parameter.grad is None:
            make = torch.empty if covers else torch.zeros
            parameter.grad = make(parameter.shape, dtype=dtype, device=value.device)
        home = parameter.grad if late.place is None else late.place.of(parameter.grad)
        if is_first and covers:
            home.copy_(value)
        else:
            home.add_(value)


def defer_weight_grads(what: nn.Module | Engine, limit: int | None = None) -> WeightQueue:
    """Make weight gradients of the matrix products in `what` wait in the queue that is returned.

    `what` is a module or an engine. An engine's `step` drains what is left, its `zero_grad` drops it, and
    gradients are reduced once, in the step. Values do not change: a weight gradient is added to `param.grad`
    when it is formed, in the dtype of accumulation. Biases, norms, and products that are not recognised get
    their gradients at once. `limit` is in bytes; see `WeightQueue`.
    """
    module = what if isinstance(what, nn.Module) else what.module
    queue = WeightQueue(limit)
    for path, owner in module.named_modules():
        if any(parameter.dim() > 1 for parameter in owner.parameters(recurse=False)):
            if hasattr(owner, _MARK):
                must, got = "must have one queue for its weight gradients", "another, which it has already"
                raise ModelError(path or "module", must, got=got, do="Call `detach()` of the first.")
            queue._handles += _attach(owner, queue)
            queue._owners.append(owner)
    queue._names = {parameter: name for name, parameter in module.named_parameters()}
    if not isinstance(what, nn.Module):
        gradients = native(what.executor).gradients
        gradients.late = queue
        queue._gradients = gradients
    return queue


def defer_in_piece(piece: nn.Module, gradients: Gradients) -> WeightQueue:
    """Return the queue of a piece of a pipeline, whose schedule forms what waits."""
    queue = defer_weight_grads(piece)
    queue._gradients, queue._scheduled = gradients, True
    return queue


_MARK = "_zerodrift_weight_queue"


def _attach(owner: nn.Module, queue: WeightQueue) -> list[Any]:
    modes: list[_Deferring] = []

    def before(module: nn.Module, args: Any) -> None:
        mode = _Deferring(queue)
        mode.__enter__()
        modes.append(mode)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        # Called even if the forward raised: a recomputation stops so when it has all that it needs.
        if modes:
            modes.pop().__exit__(None, None, None)

    object.__setattr__(owner, _MARK, queue)
    return [owner.register_forward_pre_hook(before), owner.register_forward_hook(after, always_call=True)]


class _Deferring(TorchFunctionMode):
    """Makes products leave their weight gradient in a queue while it is on."""

    def __init__(self, queue: WeightQueue) -> None:
        super().__init__()
        self._queue = queue
        self._watched: set[torch.Tensor] = set()
        """Parameters with a hook on one of their views."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.Tensor.register_hook, torch.Tensor.retain_grad) and args[0]._base is not None:
            self._watched.add(args[0]._base)
        call = recognise(func, args, kwargs)
        if call is None or call.parameter in self._watched:
            return func(*args, **kwargs)
        how = self._queue, self._watched, call
        return _Product.apply(how, call.x, call.weight, call.bias, call.offsets)


class _Product(torch.autograd.Function):
    """A product whose backward puts the weight's half into a queue."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[WeightQueue, set[torch.Tensor], MatrixProduct],
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.queue, ctx.watched, call = how
        ctx.call = dataclasses.replace(call, x=weight, bias=None)  # without tensors of the graph
        ctx.bias_shape = None if bias is None else bias.shape
        return call.run(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight, offsets = ctx.saved_tensors
        call: MatrixProduct = ctx.call

        def form(dtype: torch.dtype) -> torch.Tensor:
            return weight_gradient(call.kind, x, grad, offsets, dtype)

        of_x = input_gradient(call.kind, grad, weight, offsets) if ctx.needs_input_grad[1] else None
        of_bias = None
        if ctx.bias_shape is not None and ctx.needs_input_grad[3]:
            of_bias = grad.sum_to_size(ctx.bias_shape)
        wanted = asked(call.parameter, call.weight)
        watched = hooked(call.parameter) or hooked(call.weight) or call.parameter in ctx.watched
        if wanted == "late" and (watched or torch.is_grad_enabled()):
            wanted = "now"  # see [Note: hooks]; with `create_graph` this gradient is itself part of a graph
        if wanted == "late":
            ctx.queue.put(call.parameter, form, (x, grad), call.place)
        return None, of_x, form(weight.dtype) if wanted == "now" else None, of_bias, None
