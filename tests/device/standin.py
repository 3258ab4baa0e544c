"""A stand-in for a GPU: kernels run on the host, as late and in as bad an order as streams allow.

`standin.cpp` has memory that the host cannot touch, streams, events and a caching allocator. Here every
operation on the device's tensors becomes a launch: its stream, its reads and writes, and its computation.
`races.py` checks that launches are ordered, and `Order` says when they run.

Invariant: a launch runs after the earlier work of its stream, and after the events that the stream waits
for. Nothing else holds it back.
"""

from __future__ import annotations

import contextlib
import functools
import time
import types
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

import torch

import zerodrift
from tests.device.build import extension
from tests.device.copies import Copies, set_item
from tests.device.races import Access, RaceChecker, stack

NAME = "standin"
DEVICES = 4

Order = Literal["at once", "side streams first", "side streams last", "random"]
"""When launches run: when they are issued, or when the host waits, in one of three orders."""

ORDERS: tuple[Order, ...] = ("at once", "side streams first", "side streams last", "random")

SHORTEST, LONGEST = 5e-5, 2e-3
"""Seconds between two looks at what waits for other ranks, longer the longer nothing goes on."""


@dataclass(slots=True)
class Launch:
    """Work in a stream. `start` begins it and returns whether it is over; until then it is asked again."""

    name: str
    start: Callable[[], bool]


@dataclass(slots=True)
class Signal:
    """An event that a stream records or waits for, as (number, version)."""

    event: tuple[int, int]
    records: bool


@dataclass
class Device:
    """The devices of this process: the queues of their streams, counts, and the checker of races."""

    native: Any
    order: Order = "at once"
    random: Random = field(default_factory=lambda: Random(0))
    queues: dict[int, deque[Launch | Signal]] = field(default_factory=lambda: defaultdict(deque))
    recorded: set[tuple[int, int]] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    races: RaceChecker = field(default_factory=RaceChecker)
    running: bool = False
    record: Callable[[str, int, str, int], None] = lambda what, stream, name, size: None
    """Called with each event of the device: (what, stream, name or address, bytes)."""
    dry: bool = False
    """Whether launches are recorded and never run, so that memory is only addresses. What is read is zero."""

    def forget(self) -> None:
        """Drop the launches that a failed test has left in streams."""
        self.native.drain()
        self.queues.clear()
        self.recorded.clear()
        self.counts.clear()
        self.races, self.order = RaceChecker(), "at once"

    def launch(self, stream: int, name: str, accesses: Sequence[Access], start: Callable[[], bool]) -> None:
        """Put work into a stream."""
        self.read_log()
        self.counts["launches"] += 1
        self.record("launch", stream, name, 0)
        if self.dry:
            return
        self.races.launch(stream, name, accesses)
        self.queues[stream].append(Launch(name, start))
        if self.order == "at once":
            self.run(lambda: True)

    def on_host(self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """Check an access of the host to page-locked memory, which must be reported by its caller."""
        self.read_log()
        self.races.on_host(name, [*accesses(reads, writes=False), *accesses(writes, writes=True)])

    def read_log(self) -> None:
        """Read the extension's log of allocations, records and waits since the last launch."""
        for what, stream, first, second in self.native.drain():
            if what in "af":
                self.record("allocation" if what == "a" else "free", stream, str(first), second)
            if self.dry:
                continue
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

    def called(self, what: str, number: int, version: int = 0) -> None:
        """Answer the extension: memory was allocated or moves, or the host waits."""
        self.read_log()
        if what == "allocation":
            return
        if what != "resize":
            self.counts["host waits"] += 1
            self.record("wait", number, what, 0)
            self.races.host_waits(what, (number, version) if what == "event" else number)
        if what == "event":
            self.run(lambda: (number, version) in self.recorded)
        elif what == "stream":
            self.run(lambda: not self.queues[number])
        else:
            self.run()

    def _is_idle(self) -> bool:
        return not any(self.queues.values())

    def run(self, is_over: Callable[[], bool] | None = None) -> None:
        """Run launches in the device's order until `is_over`, by default until none is left. Those that
        wait for other ranks are asked again."""
        is_over = is_over or self._is_idle
        if self.running:
            return
        self.running, pause = True, SHORTEST
        waiting: set[int] = set()
        self.read_log()
        try:
            while ready := [
                number for number, queue in self.queues.items() if queue and self._is_ready(queue[0])
            ]:
                free = [stream for stream in ready if stream not in waiting]
                if not free and is_over():
                    return
                if not free:
                    time.sleep(pause)
                    pause = min(2 * pause, LONGEST)
                    waiting.clear()
                    continue
                stream = self._choose(free)
                if self._advance(self.queues[stream]):
                    waiting.clear()
                    pause = SHORTEST
                else:
                    waiting.add(stream)  # other streams go on meanwhile
            assert self._is_idle(), "a stream waits for an event that no stream records"
        finally:
            self.running = False

    def _advance(self, queue: deque[Launch | Signal]) -> bool:
        head = queue[0]
        if isinstance(head, Signal) and head.records:
            self.recorded.add(head.event)
        if isinstance(head, Launch) and not head.start():
            return False
        queue.popleft()
        return True

    def _is_ready(self, head: Launch | Signal) -> bool:
        return isinstance(head, Launch) or head.records or head.event in self.recorded

    def _choose(self, streams: list[int]) -> int:
        if self.order == "random":
            return self.random.choice(streams)
        return max(streams) if self.order == "side streams first" else min(streams)


def accesses(tensors: Sequence[torch.Tensor], *, writes: bool) -> list[Access]:
    """Return the ranges of memory that tensors span, of those that a device can reach."""
    found = []
    for tensor in tensors:
        if tensor.numel() and (tensor.device.type == NAME or device.native.is_pinned(tensor.data_ptr())):
            last = sum(
                (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            )
            start = tensor.data_ptr()
            found.append(Access(start, start + (last + 1) * tensor.itemsize, writes))
    return found


# --- operations ----------------------------------------------------------------------------------------


def run_operation(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Launch an operation on the current stream, and return tensors that it will have written."""
    signature = _signature(op)
    if signature.packet == "aten._foreach_copy_" and {one.device.type for one in _tensors(args)} != {NAME}:
        return [one.copy_(other, *args[2:], **kwargs) for one, other in zip(*args[:2], strict=True)]
    args = _COPIES.arguments(signature.packet, args)
    written = _tensors([signature.argument(place, args, kwargs) for place in signature.written])
    call = signature.call
    if any(place < len(args) and isinstance(args[place], _NUMBERS) for place in signature.tensors):
        call = op.overloadpacket  # the dispatcher has handed on Python's numbers where it takes tensors
    if kwargs and any(not out.numel() for out in written):
        _resize_outputs(call, args, kwargs)
    inputs = _tensors((args, kwargs))
    if any(tensor.dim() and tensor.device.type != NAME for tensor in inputs) and _is_asked_by_engine():
        places = ", ".join(sorted({str(tensor.device) for tensor in inputs}))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {places} in {op}")
    host_args, host_kwargs = _mapped(_as_launched, (args, kwargs))
    shapes = None

    def compute() -> Any:
        # Tensors of an inference mode, which may be over when a launch runs, are written only in one.
        with torch.inference_mode(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return call(*host_args, **host_kwargs)

    if signature.draws and not device.dry:
        compute = _drawing(call, compute, host_args, host_kwargs)
    if signature.returned is not None:
        launch_on(signature.name, inputs, written, lambda: compute() is None or True)
        found = [signature.argument(place, args, kwargs) for place in signature.returned]
        return None if not found else found[0] if len(found) == 1 else tuple(found)
    with contextlib.suppress(Exception):
        shapes = _shapes(call, args, kwargs)
    if shapes is None:  # they follow from values: the host waits, as it does on a GPU
        wait_for_the_stream()
        return _put(op, compute(), inputs, written)
    if signature.is_norm:
        shapes = tuple(shape.to(args[0].dtype) for shape in shapes)
    results = _mapped(_empty_like, shapes)
    made = _tensors(results)
    targets = [device.native.host_view(tensor) for tensor in made]

    def start() -> bool:
        with torch.inference_mode():
            for target, value in zip(targets, _tensors(compute()), strict=True):
                if value.numel() or signature.name != _BATCH_NORM:
                    target.copy_(value)
        return True

    launch_on(signature.name, inputs, [*written, *made], start)
    return results


@dataclass(frozen=True, slots=True)
class Signature:
    """The schema of an operation, with its arguments by their places."""

    name: str
    packet: str
    """Name without the overload."""
    call: Any
    """Function that computes it on the host."""
    names: tuple[str, ...]
    tensors: tuple[int, ...]
    """Arguments that are tensors."""
    written: tuple[int, ...]
    returned: tuple[int, ...] | None
    """Arguments that are its results; None if it makes tensors."""
    draws: bool
    """Whether it draws random numbers."""
    is_norm: bool

    def argument(self, place: int, args: Any, kwargs: Any) -> Any:
        return args[place] if place < len(args) else kwargs.get(self.names[place])


@functools.cache
def _signature(op: Any) -> Signature:
    given, results, packet = op._schema.arguments, op._schema.returns, str(op.overloadpacket)
    written = tuple(place for place, of in enumerate(given) if _is_written(of))
    returned = None
    if all(map(_is_written, results)):
        places = {alias: place for place in written for alias in given[place].alias_info.before_set}
        returned = tuple(places[next(iter(of.alias_info.before_set))] for of in results)
    return Signature(
        name=str(op),
        packet=packet,
        call=_FOR_INTEGERS.get(packet, op),
        names=tuple(of.name for of in given),
        tensors=tuple(place for place, of in enumerate(given) if isinstance(of.type, torch.TensorType)),
        written=written,
        returned=returned,
        draws=torch.Tag.nondeterministic_seeded in op.tags,
        is_norm=packet in _NORMS,
    )


def _is_written(of: Any) -> bool:
    return of.alias_info is not None and of.alias_info.is_write


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to the leaves of nested tuples, lists and dicts, which have no other containers."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_mapped(function, each) for each in value])
    if kind is dict:
        return {name: _mapped(function, each) for name, each in value.items()}
    return function(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [tensor for each in value for tensor in _tensors(each)]


def _drawing(call: Any, compute: Callable[[], Any], args: Any, kwargs: Any) -> Callable[[], Any]:
    """Return `compute` with the next numbers of its generator, drawn now, as on a GPU: of the generator in
    the arguments, or of the device's own, whose numbers are those of a CPU's with the same seed."""
    given = next((each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)), None)
    own = given or device.native.host_generator(device.native.default_generator(-1))
    used = given or torch.default_generator
    state = own.get_state()

    def draw(function: Callable[[], Any]) -> tuple[Any, torch.Tensor]:
        before = used.get_state()
        used.set_state(state)
        try:
            return function(), used.get_state()
        finally:
            used.set_state(before)

    blank_args, blank_kwargs = _mapped(_blank, (args, kwargs))
    with torch.no_grad(), torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        _, after = draw(lambda: call(*blank_args, **blank_kwargs))
    own.set_state(after)
    return lambda: draw(compute)[0]


def _blank(leaf: Any) -> Any:
    return torch.ones_like(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _shapes(call: Any, args: Any, kwargs: Any) -> Any:
    """Return the results of an operation on the meta device, from a cache."""
    key = (call, *map(_described, args), *map(_described, kwargs.items()))
    if key not in _KNOWN:
        meta_args, meta_kwargs = _mapped(_on_meta, (args, kwargs))
        with torch.no_grad():
            _KNOWN[key] = call(*meta_args, **meta_kwargs)
    return _KNOWN[key]


def _described(value: Any) -> Any:
    """Return the properties of an argument that decide the shapes of results."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device.type
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    return type(value), str(value) if isinstance(value, float) else value


_KNOWN: dict[Any, Any] = {}

_ENGINE = str(Path(zerodrift.__file__).parent)
"""Folder of callers that may not pass generators and operands of a CPU, as other tests may."""

_FOR_INTEGERS = {
    "aten.histc": lambda values, *rest: torch.histc(values.double(), *rest).to(values.dtype),
}
"""Operations that a GPU has for integers too, and a CPU only for floats."""

_NUMBERS = (int, float, complex)

_BATCH_NORM = "aten.native_batch_norm.default"
"""Operation with empty statistics in evaluation, which torch's meta device does not know."""

_NORMS = ("aten.native_layer_norm", "aten.native_group_norm")
"""Operations whose statistics have the input's dtype on a CPU, and fp32 elsewhere."""

_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def launch_on(
    name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], start: Callable[[], bool]
) -> None:
    """Launch work on the current stream."""
    ranges = [*accesses(reads, writes=False), *accesses(writes, writes=True)]
    device.launch(_stream(), name, ranges, start)


def _put(op: Any, computed: Any, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> Any:
    """Return computed values as tensors of the device."""
    results = _mapped(_empty_like, computed)
    made = _tensors(results)
    for target, value in zip(made, _tensors(computed), strict=True):
        device.native.host_view(target).copy_(value)
    launch_on(str(op), inputs, [*written, *made], lambda: True)
    return results


def _empty_like(tensor: Any) -> Any:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    place = torch.device(NAME, torch.accelerator.current_device_index())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


def _on_host(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.device.type == NAME:
        return device.native.host_view(leaf)
    if isinstance(leaf, torch.device) and leaf.type == NAME:
        return torch.device("cpu")
    if isinstance(leaf, torch.Generator) and leaf.device.type == NAME:
        return device.native.host_generator(leaf)
    if isinstance(leaf, torch.Generator) and _is_asked_by_engine():  # torch's words
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{leaf.device.type}'")
    return leaf


def _is_asked_by_engine() -> bool:
    """Return whether the engine calls an operation, through any modes of its own."""
    callers = (code for code, _ in stack() if not code.co_name.startswith("__torch_"))
    return next((code.co_filename.startswith(_ENGINE) for code in callers), False)


def _as_launched(leaf: Any) -> Any:
    """Return an argument of a launch. A number in a tensor of the host is read at once."""
    on_host = _on_host(leaf)
    return leaf.clone() if on_host is leaf and isinstance(leaf, torch.Tensor) and not leaf.dim() else on_host


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and (leaf.device.type == NAME or leaf.dim()):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return None if isinstance(leaf, torch.Generator) else leaf


def _resize_outputs(call: Any, args: Any, kwargs: Any) -> None:
    """Give empty `out` arguments the shapes that the operation will write."""
    meta_args, meta_kwargs = _mapped(_on_meta, (args, kwargs))
    call(*meta_args, **meta_kwargs)
    for name, out in kwargs.items():
        if isinstance(out, torch.Tensor) and out.shape != meta_kwargs[name].shape:
            out.resize_(meta_kwargs[name].shape)


def launch_copy(source: torch.Tensor, target: torch.Tensor, host_waits: bool) -> None:
    """Copy one range of memory to another. Without the host's waiting its memory is read or written late."""
    from_host, to_host = source.device.type == "cpu", target.device.type == "cpu"
    values, out = _resolved(source), _resolved(target)
    if from_host and host_waits:
        values = values.clone()  # staged
    if from_host or to_host:
        way = "from the host" if from_host else "to the host"
        device.counts[f"copies {way}"] += 1
        kind = "pinned" if _is_pinned(source if from_host else target) else "pageable"
        device.record("copy", _stream(), f"{way}, {kind}", source.nbytes)

    def start() -> bool:
        with torch.inference_mode():
            out.copy_(values)
        return True

    launch_on("copy_", [source], [target], start)
    if device.dry and to_host:
        target.zero_()
    if host_waits:
        wait_for_the_stream()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the host's view of a tensor, conjugated or negated where that is."""
    view: torch.Tensor = _on_host(tensor)
    if view is not tensor:
        view = view.conj() if tensor.is_conj() else view
        view = torch._neg_view(view) if tensor.is_neg() else view
    return view


def _is_pinned(tensor: torch.Tensor) -> bool:
    return bool(device.native.is_pinned(tensor.data_ptr()))


def wait_for_the_stream() -> None:
    """Let the host wait for the current stream."""
    device.called("stream", _stream())


def scalar(tensor: torch.Tensor) -> Any:
    """Read one value; the host waits."""
    launch_on("item", [tensor], [], lambda: True)
    wait_for_the_stream()
    return device.native.host_view(tensor).item()


def _stream() -> int:
    return int(torch.accelerator.current_stream().stream_id)


def _kernels() -> list[str]:
    """Return the operations with a kernel of their own on a CPU that torch would compose of others here."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composed = (
        "CompositeExplicitAutograd",
        "CompositeImplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
    )
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return [name for name in names if has(name, "CPU") and any(has(name, key) for key in composed)]


def _launcher(name: str) -> Callable[..., Any]:
    base, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda *args, **kwargs: run_operation(op, *args, **kwargs)


def convolve(*args: Any) -> Any:
    return run_operation(torch.ops.aten.convolution.default, *args)


def convolve_back(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *args: Any) -> Any:
    return run_operation(torch.ops.aten.convolution_backward.default, grad, x, weight, [grad.shape[1]], *args)


# --- the module `torch.standin` ------------------------------------------------------------------------


def _module(native: Any) -> types.ModuleType:
    def index_of(of: Any = None) -> int:
        index = of if isinstance(of, int) or of is None else torch.device(of).index
        return torch.accelerator.current_device_index() if index is None else index

    def seed_all(seed: int) -> None:
        for index in range(DEVICES):
            native.default_generator(index).manual_seed(seed)

    made = types.ModuleType(f"torch.{NAME}")
    made.__dict__.update(
        Stream=torch.Stream,
        Event=torch.Event,
        current_stream=torch.accelerator.current_stream,
        device=lambda of: torch.accelerator.device_index(index_of(of)),
        stream=lambda stream: stream,
        get_device_name=lambda of=None: "the stand-in device",
        max_memory_allocated=torch.accelerator.max_memory_allocated,
        memory_allocated=torch.accelerator.memory_allocated,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,  # activation checkpointing keeps random states of such devices only
        _is_in_bad_fork=lambda: False,
        device_count=lambda: DEVICES,
        current_device=index_of,
        set_device=torch.accelerator.set_device_index,
        synchronize=torch.accelerator.synchronize,
        manual_seed=lambda seed: native.default_generator(index_of()).manual_seed(seed),
        manual_seed_all=seed_all,
        get_rng_state=lambda of=None: native.default_generator(index_of(of)).get_state(),
        set_rng_state=lambda state, of=None: native.default_generator(index_of(of)).set_state(state),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        default_generators=[native.default_generator(index) for index in range(DEVICES)],
    )
    return made


_COPIES = Copies(launch_copy, _is_pinned, wait_for_the_stream)

device: Device
_LIBRARIES: list[torch.library.Library] = []


def install() -> Device:
    """Make the device known to torch."""
    global device
    if not _LIBRARIES:
        torch.ones(1, requires_grad=True).backward()  # autograd has made the threads of all other devices
        torch.utils.rename_privateuse1_backend(NAME)
        torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps ties, as on CUDA
        device = Device(extension())
        device.native.start_backward_threads()
        torch._register_device_module(NAME, _module(device.native))
        torch.utils.generate_methods_for_privateuse1_backend()
        device.native.on_call(device.called)
        torch.Tensor.__setitem__ = set_item  # type: ignore[method-assign]
        everything, some = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        everything.fallback(run_operation, "PrivateUse1")
        for name in _kernels():
            some.impl(name.removeprefix("aten::"), _launcher(name), "PrivateUse1")
        some.impl("_copy_from", _COPIES.copy, "PrivateUse1")
        some.impl("_local_scalar_dense", scalar, "PrivateUse1")
        for lazy in ("Conjugate", "Negative"):  # or these would copy for ever, to resolve what is copied
            some.impl("_copy_from", torch.library.fallthrough_kernel, lazy)
        some.impl("convolution_overrideable", convolve, "PrivateUse1")
        some.impl("convolution_backward_overrideable", convolve_back, "PrivateUse1")
        _LIBRARIES.extend([everything, some])
    return device


@contextlib.contextmanager
def ordered(order: Order, seed: int = 0) -> Iterator[Device]:
    """Run launches in this order inside of the `with`, and count from zero."""
    device.run()
    device.order, device.random = order, Random(seed)
    device.counts.clear()
    try:
        yield device
        device.run()
    finally:
        device.order = "at once"
