"""A device that is not here, for tests: kernels run on the host, as late and in as bad an order as streams allow.

`standin.cpp` has memory that the host cannot touch, streams, events and a caching allocator. Here every operation on
the device's tensors becomes a launch: what it reads and writes, on which stream, and what it computes. `races.py`
checks that launches are ordered; `Order` says when they run.

Invariant: a launch runs after what its stream and the events that the stream waited for promise, and after nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from tests.device.build import extension
from tests.device.races import Access, RaceChecker

NAME = "standin"
DEVICES = 4

Order = Literal["at once", "side streams first", "side streams last", "random"]
"""When launches run: when they are issued, or when the host waits, in one of three orders."""


@dataclass(slots=True)
class Launch:
    """Work in a stream. `start` begins it and returns whether it is over; it is asked again until then."""

    start: Callable[[], bool]


@dataclass(slots=True)
class Signal:
    """An event that is recorded in a stream, or waited for."""

    event: tuple[int, int]
    records: bool


@dataclass
class Device:
    """All devices of this process: queues of the streams, what was counted, and the checker of races."""

    native: Any
    order: Order = "at once"
    random: Random = field(default_factory=lambda: Random(0))
    queues: dict[int, deque[Launch | Signal]] = field(default_factory=lambda: defaultdict(deque))
    recorded: set[tuple[int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    races: RaceChecker = field(default_factory=RaceChecker)
    running: bool = False

    def forget(self) -> None:
        """Begin anew: what a failed test has left in streams never runs."""
        self.native.drain()
        self.queues.clear()
        self.counts.clear()
        self.races = RaceChecker()

    def launch(self, stream: int, name: str, accesses: Sequence[Access], start: Callable[[], bool]) -> None:
        """Put work into a stream."""
        self.read_log()
        self.counts["launches"] += 1
        self.races.launch(stream, name, accesses)
        self.queues[stream].append(Launch(start))
        if self.order == "at once":
            self.run(until_over=False)

    def read_log(self) -> None:
        """Take over what the device was told since the last launch."""
        for what, stream, first, second in self.native.drain():
            if what == "a":
                self.counts["allocations"] += 1
                self.counts["allocated bytes"] += second
                self.races.allocate(stream, first, second)
            elif what == "e":
                self.races.record((first, second), stream)
                self.queues[stream].append(Signal((first, second), True))
            elif what == "w":
                self.races.wait((first, second), stream)
                if second:
                    self.queues[stream].append(Signal((first, second), False))

    def host_waits(self, what: str, number: int, version: int = 0) -> None:
        """Run everything that was launched: the host waits for some of it."""
        self.read_log()
        if what == "allocation":
            return None
        if what == "resize":  # the values move to new memory
            return self.run()
        self.counts["host waits"] += 1
        self.races.host_waits(what, (number, version) if what == "event" else number)
        self.run()

    def run(self, *, until_over: bool = True) -> None:
        """Run all launches, each after what it waits for; without `until_over` none that waits for other ranks."""
        if self.running:
            return
        self.running = True
        waiting: set[int] = set()
        self.read_log()
        try:
            while ready := [stream for stream, queue in self.queues.items() if queue and self._is_ready(queue[0])]:
                free = [stream for stream in ready if stream not in waiting]
                if not free and not until_over:
                    return
                if not free:
                    time.sleep(1e-4)
                    waiting.clear()
                    continue
                stream = self._choose(free)
                head = self.queues[stream][0]
                if isinstance(head, Signal):
                    if head.records:
                        self.recorded.add(head.event)
                    self.queues[stream].popleft()
                elif head.start():
                    self.queues[stream].popleft()
                    waiting.clear()
                else:
                    waiting.add(stream)  # for other ranks; other streams go on
            assert not until_over or not any(self.queues.values()), "a stream waits for an event that no stream records"
        finally:
            self.running = False

    def _is_ready(self, head: Launch | Signal) -> bool:
        return isinstance(head, Launch) or head.records or head.event in self.recorded

    def _choose(self, ready: list[int]) -> int:
        if self.order == "random":
            return self.random.choice(ready)
        return max(ready) if self.order == "side streams first" else min(ready)


def accesses(tensors: Sequence[torch.Tensor], writes: bool) -> list[Access]:
    """Return the ranges of memory that tensors cover, if a device can reach them."""
    found = []
    for tensor in tensors:
        if tensor.numel() and (tensor.device.type == NAME or device.native.is_pinned(tensor.data_ptr())):
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            found.append(Access(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize, writes))
    return found


# --- operations ------------------------------------------------------------------------------------------------


def run_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch an operation on the current stream, and return tensors that it will have written."""
    call = op.overloadpacket if _has_numbers_for_tensors(op, args) else op
    written = _written(op, args, kwargs)
    inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(not out.numel() for out in written) and kwargs:
        _resize_outputs(op, args, kwargs)
    random = torch.Tag.nondeterministic_seeded in op.tags
    shapes = None if random else _shapes(op, call, args, kwargs)
    host_args, host_kwargs = pytree.tree_map(_on_host, (args, kwargs))
    if shapes is None:
        return _run_now(op, call, args, kwargs, host_args, host_kwargs, written, inputs, random=random)
    fresh, results = _outputs(op, args, kwargs, shapes)
    targets = [device.native.host_view(out) for out in fresh if out is not None]

    def start() -> bool:
        computed = _compute(call, host_args, host_kwargs)
        for target, value in zip(targets, _fresh_tensors(op, computed), strict=True):
            target.copy_(value)
        return True

    made = [out for out in fresh if out is not None]
    ranges = [*accesses(inputs, False), *accesses([*written, *made], True)]
    device.launch(_stream(), str(op), ranges, start)
    return results


def _compute(op: Any, args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*args, **kwargs)


_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _run_now(
    op: Any, call: Any, args: Any, kwargs: Any, host_args: Any, host_kwargs: Any, written: Any, inputs: Any, *, random: bool
) -> Any:
    """Run an operation whose results have shapes that follow from values; the host waits, as it does on a GPU."""
    stream = _stream()
    if random:
        device.run()  # numbers are drawn in the order of the calls
    else:
        device.host_waits("stream", stream)
    computed = _compute(call, host_args, host_kwargs)
    leaves, spec = pytree.tree_flatten(computed)
    outs, aliases = [], dict(zip(map(id, pytree.tree_leaves((host_args, host_kwargs))), pytree.tree_leaves((args, kwargs))))
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor) or id(leaf) in aliases:
            outs.append(aliases.get(id(leaf), leaf))
            continue
        out = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=torch.device(NAME, _index()))
        device.native.host_view(out).copy_(leaf)
        outs.append(out)
    made = [out for out in outs if isinstance(out, torch.Tensor)]
    device.launch(stream, str(op), [*accesses(inputs, False), *accesses([*written, *made], True)], lambda: True)
    return pytree.tree_unflatten(outs, spec)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME:
        return device.native.host_view(leaf)
    if isinstance(leaf, torch.device) and leaf.type == NAME:
        return torch.device("cpu")
    if isinstance(leaf, torch.Generator) and leaf.device.type == NAME:
        return device.native.host_generator(leaf)
    return leaf


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and (leaf.device.type == NAME or leaf.dim()):  # a lone number stays
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return None if isinstance(leaf, torch.Generator) else leaf


def _has_numbers_for_tensors(op: Any, args: Any) -> bool:
    """Return whether the dispatcher has handed on Python's numbers where the operation takes tensors."""
    return any(
        isinstance(argument.type, torch.TensorType) and isinstance(value, (int, float, bool, complex))
        for argument, value in zip(op._schema.arguments, args, strict=False)
    )


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the arguments that an operation writes."""
    found: list[torch.Tensor] = []
    for place, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _shapes(op: Any, call: Any, args: Any, kwargs: Any) -> Any:
    """Return an operation's results without values; None if its shapes follow from values."""
    returns = op._schema.returns
    if returns and all(of.alias_info is not None and of.alias_info.is_write for of in returns) or not returns:
        return ()
    meta_args, meta_kwargs = pytree.tree_map(_on_meta, (args, kwargs))
    try:
        with torch.no_grad():
            return call(*meta_args, **meta_kwargs)
    except Exception:
        return None


def _resize_outputs(op: Any, args: Any, kwargs: Any) -> None:
    """Give empty `out` arguments the shapes that the operation will write."""
    meta_args, meta_kwargs = pytree.tree_map(_on_meta, (args, kwargs))
    op(*meta_args, **meta_kwargs)
    for name, out in kwargs.items():
        if isinstance(out, torch.Tensor) and out.shape != meta_kwargs[name].shape:
            out.resize_(meta_kwargs[name].shape)


def _outputs(op: Any, args: Any, kwargs: Any, shapes: Any) -> tuple[list[torch.Tensor | None], Any]:
    """Return the new tensors of an operation in their order, and everything that it returns."""
    returns = op._schema.returns
    named = {argument.name: place for place, argument in enumerate(op._schema.arguments)}
    if shapes == () and returns:
        given = []
        for of in returns:
            (source,) = [
                argument
                for argument in op._schema.arguments
                if argument.alias_info is not None and argument.alias_info.before_set == of.alias_info.before_set
            ]
            place = named[source.name]
            given.append(args[place] if place < len(args) else kwargs[source.name])
        return [], given[0] if len(given) == 1 else tuple(given)
    leaves, spec = pytree.tree_flatten(shapes)
    made: list[Any] = [
        torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=torch.device(NAME, _index()))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    fresh = [leaf for leaf in made if isinstance(leaf, torch.Tensor)]
    return list(fresh), pytree.tree_unflatten(made, spec)


def _fresh_tensors(op: Any, computed: Any) -> list[torch.Tensor]:
    returns = op._schema.returns
    if not returns or all(of.alias_info is not None and of.alias_info.is_write for of in returns):
        return []
    return [leaf for leaf in pytree.tree_leaves(computed) if isinstance(leaf, torch.Tensor)]


def copy(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between devices, or on one. Only page-locked memory of the host is read or written late."""
    host = [tensor for tensor in (source, target) if tensor.device.type == "cpu"]
    locked = all(device.native.is_pinned(tensor.data_ptr()) for tensor in host if tensor.numel())
    values, out = _on_host(source), _on_host(target)
    if host and not (locked and non_blocking) and source.device.type == "cpu":
        values = values.clone()  # staged
    if host:
        device.counts["copies from the host" if source.device.type == "cpu" else "copies to the host"] += 1
        device.counts["pageable copies"] += not locked

    def start() -> bool:
        with torch.no_grad():
            out.copy_(values)
        return True

    stream = _stream()
    device.launch(stream, "copy_", [*accesses([source], False), *accesses([target], True)], start)
    if target.device.type == "cpu" and not (locked and non_blocking):
        device.host_waits("stream", stream)
    return target


def scalar(tensor: torch.Tensor) -> Any:
    """Read one value; the host waits."""
    device.launch(_stream(), "item", accesses([tensor], False), lambda: True)
    device.host_waits("stream", _stream())
    return device.native.host_view(tensor).item()


def _index() -> int:
    return torch._C._accelerator_getDeviceIndex()


def _stream() -> int:
    return int(torch.accelerator.current_stream().stream_id)


def _kernels() -> list[str]:
    """Return the operations that have a kernel of their own on a CPU, where torch would compose others for us."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composed = ("CompositeExplicitAutograd", "CompositeImplicitAutograd", "CompositeExplicitAutogradNonFunctional")
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name for name in names if has(name, "CPU") and any(has(name, key) for key in composed)]


def _launcher(name: str) -> Callable[..., Any]:
    base, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def launch(*args: Any, **kwargs: Any) -> Any:
        return run_operation(op, *args, **kwargs)

    return launch


# --- the module `torch.standin` --------------------------------------------------------------------------------


def _module() -> types.ModuleType:
    made = types.ModuleType(f"torch.{NAME}")

    def seed_all(seed: int) -> None:
        for index in range(DEVICES):
            native.default_generator(index).manual_seed(seed)

    def current(of: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(of)

    native = device.native
    made.__dict__.update(
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=current,
        stream=lambda stream: stream,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: DEVICES,
        current_device=_index,
        set_device=torch.accelerator.set_device_index,
        synchronize=torch.accelerator.synchronize,
        manual_seed=lambda seed: native.default_generator(_index()).manual_seed(seed),
        manual_seed_all=seed_all,
        get_rng_state=lambda of=_NONE: native.default_generator(_number(of)).get_state(),
        set_rng_state=lambda state, of=_NONE: native.default_generator(_number(of)).set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        default_generators=[native.default_generator(index) for index in range(DEVICES)],
    )
    return made


_NONE = None


def _number(of: Any) -> int:
    if isinstance(of, int):
        return of
    index = None if of is None else torch.device(of).index
    return _index() if index is None else index


def install() -> Device:
    """Make `torch.device("standin")` known to torch, once a process."""
    global device
    if "device" not in globals():
        torch.utils.rename_privateuse1_backend(NAME)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps ties, as on CUDA
        device = Device(extension())
        torch._register_device_module(NAME, _module())
        torch.utils.generate_methods_for_privateuse1_backend()
        device.native.on_wait(device.host_waits)
        everything = torch.library.Library("_", "IMPL")
        everything.fallback(run_operation, "PrivateUse1")
        some = torch.library.Library("aten", "IMPL")
        for name in _kernels():
            some.impl(name.removeprefix("aten::"), _launcher(name), "PrivateUse1")
        some.impl("_copy_from", copy, "PrivateUse1")
        some.impl("_local_scalar_dense", scalar, "PrivateUse1")
        _LIBRARIES.extend([everything, some])
    return device


_LIBRARIES: list[Any] = []
device: Device


@contextlib.contextmanager
def ordered(order: Order, seed: int = 0) -> Iterator[Device]:
    """Run launches in this order inside of the `with`, and count from zero."""
    device.run()
    device.order, device.random, device.counts = order, Random(seed), Counter()
    try:
        yield device
        device.run()
    finally:
        device.order = "at once"
