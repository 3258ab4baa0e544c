"""Runs the operations of a trace without values, and writes each down.

`torch._subclasses.fake_tensor` is private, and so are autograd's node and its number that are asked for here.
Tested with torch 2.13.

[Note: mixed dtypes] torch's forms of operations for tensors without values do not all refuse what the
operations refuse. So what refuses operands of several floating dtypes on a CPU is listed here, and a test
compares the list with torch.
"""

from __future__ import annotations

import bisect
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerodrift.dtypes import from_torch
from zerodrift.observer.operations import VIEWS, flops_of
from zerodrift.observer.places import ModulePaths, place_of_code
from zerodrift.plan.traced import CastBy, Refusal, TracedOperation, TracedTensor

DEVICE = "cpu"
"""Which of torch's lists autocast goes by; those of other devices differ in a few operations."""

SMALL = 1 << 16
"""Elements up to which whole numbers keep their values."""

ONE_DTYPE = frozenset((
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution", "_grouped_mm",
    "linalg_cross", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_",
    "_unsafe_index_put", "_index_put_impl_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "masked_scatter", "masked_scatter_", "_embedding_bag", "grid_sampler_2d", "grid_sampler_3d", "polar",
    "complex", "nll_loss_forward", "nll_loss2d_forward", "_cdist_forward",
    "_linalg_solve_ex",
))  # fmt: skip
"""See [Note: mixed dtypes]."""

NORMS = frozenset(("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit"))
"""Whose parameters may be wider than what they norm, and not narrower."""

COMPUTES_NOTHING = VIEWS | frozenset((
    "diagonal", "movedim", "real", "unfold", "view_as_complex", "view_as_real", "_conj", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size", "_local_scalar_dense",
    "equal", "set_", "resize_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_",
))  # fmt: skip
"""What is not written down."""

SAYS_CAST = frozenset((
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "copy_", "__setitem__",
    "tensor", "as_tensor", "asarray", "softmax", "log_softmax", "sum", "mean", "prod", "cumsum", "cumprod",
    "norm",
))  # fmt: skip
"""Calls by which a model itself asks for a dtype: what they cast, autocast does not."""


class RefusedError(RuntimeError):
    """An operation that torch would refuse, with an error of this kind."""


@dataclass(slots=True)
class _FunctionCall:
    """One of torch's functions, as it is called in Python."""

    name: str = ""
    autocast: bool = False
    computed: bool = False
    """Whether an operation of it has run that is no cast: autocast casts before."""

    def cast_by(self) -> CastBy:
        """Who asks for a cast inside."""
        if not self.name or self.name in SAYS_CAST:
            return "the model"
        return "autocast" if self.autocast and not self.computed else "torch"


class FunctionCalls(TorchFunctionMode):
    """Which of torch's functions is called, as it is written in Python, and whether autocast is on then."""

    def __init__(self, recorder: OperationRecorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **(kwargs or {}))
        recorder = self._recorder
        before, recorder.call = recorder.call, _FunctionCall(name, torch.is_autocast_enabled(DEVICE))
        try:
            return func(*args, **(kwargs or {}))
        except RefusedError:
            raise
        except RuntimeError as error:  # what a function looks at before it runs an operation
            dtypes = _floating(
                [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            )
            if len(dtypes) > 1 and "type" in str(error).lower():
                recorder.refuse(name, dtypes, str(error).splitlines()[0])
            raise
        finally:
            recorder.call = before


class OperationRecorder(TorchDispatchMode):
    """Runs every operation without values, and writes it down."""

    def __init__(self, fake: FakeTensorMode, paths: ModulePaths) -> None:
        super().__init__()
        self._fake, self._paths = fake, paths
        self.operations: list[TracedOperation] = []
        self.backward = False
        self.call = _FunctionCall()
        self.refused: Refusal | None = None
        self.failed: tuple[tuple[str, int], str, CastBy] | None = None
        """Where an operation was that raised."""
        self._storages: list[Any] = []
        """Held, so that no number comes again; they have no memory."""
        self._numbers: dict[int, int] = {}
        self._unknown: set[int] = set()
        """Storages of numbers that were known, and were written to since."""
        self._instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._nodes: list[int] = []
        """Numbers of autograd's nodes, ascending, and what made each."""
        self._made: list[tuple[str, int, str]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `observe.py`

    def memory(self, tensor: torch.Tensor) -> int:
        whole: Any = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
        key = whole._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._storages)
            self._storages.append(whole)
        return self._numbers[key]

    def held(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A buffer of that dtype: with its values where they are whole numbers, else without."""
        if not tensor.is_meta and _keeps_values(tensor):
            return tensor.to(dtype)
        if dtype is tensor.dtype:
            return self._faked(tensor)
        with self._fake:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=DEVICE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for at every step of torch's own code
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        name = name_of(func)
        if given and all(map(self._is_known, given)):
            out = tree_map(self._without_value, func(*args, **kwargs))
        elif name == "_local_scalar_dense" and not isinstance(given[0], FakeTensor) and not given[0].is_meta:
            return func(*args, **kwargs)
        else:
            self._require_one_dtype(name, given)
            out = self._run(func, args, kwargs, given)
        if name not in COMPUTES_NOTHING and func.namespace != "prim":
            self._write_down(name, given, out, flops_of(func, args, kwargs, out))
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """The operation without values."""
        name = name_of(func)
        lifts = name in ("lift_fresh", "lift_fresh_copy")
        if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
            args = (args[0], self._indices(args[1]), *args[2:])
        plain = lifts or all(isinstance(tensor, FakeTensor) for tensor in given)
        instead = (args, kwargs) if plain else tree_map(self._faked, (args, kwargs))
        try:
            with self._fake:
                out = _shaped(func, *instead)
        except (RuntimeError, TypeError) as error:
            dtypes = _floating(given)
            if len(dtypes) > 1 and ("dtype" in str(error) or "scalar type" in str(error)):
                self.refuse(name, dtypes, str(error).splitlines()[0])
            self.failed = self._place()
            raise
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException):
            self.failed = self._place()
            raise
        if func._schema.is_mutable:
            self._written(func, args, kwargs)
            stands_for = {id(new): old for old, new in self._instead.values()}
            out = tree_map(lambda leaf: stands_for.get(id(leaf), leaf), out)
        if not given and isinstance(out, FakeTensor) and _keeps_values(out) and out.numel() <= SMALL:
            return func(*args, **kwargs)
        return out

    def _written(self, func: Any, args: Any, kwargs: Any) -> None:
        """Known numbers that were written to by an operation on others are known no more."""
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[place] if place < len(args) else kwargs.get(argument.name)
            for leaf in tree_leaves(written):
                if isinstance(leaf, torch.Tensor) and self._is_known(leaf):
                    self._unknown.add(leaf.untyped_storage()._cdata)

    def _indices(self, indices: Any) -> list[Any]:
        """The indices of an operation, a mask that is known as the places that it has."""
        found: list[Any] = []
        for index in indices:
            mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and self._is_known(index)
            found += index.nonzero(as_tuple=True) if mask else [index]
        return found

    # --- values ---------------------------------------------------------------------------------------

    def _is_known(self, tensor: torch.Tensor) -> bool:
        plain = not isinstance(tensor, FakeTensor) and not tensor.is_meta and _keeps_values(tensor)
        return plain and tensor.untyped_storage()._cdata not in self._unknown

    def _without_value(self, leaf: Any) -> Any:
        """What came of known numbers: they keep their values, floating ones do not."""
        return leaf if not isinstance(leaf, torch.Tensor) or _keeps_values(leaf) else self._faked(leaf)

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._instead:
            if leaf.is_meta:
                with self._fake:
                    size, stride = leaf.size(), leaf.stride()
                    made = torch.empty_strided(size, stride, dtype=leaf.dtype, device=DEVICE)
            else:
                with torch.no_grad():
                    made = self._fake.from_tensor(leaf.detach(), static_shapes=True)
            self._instead[id(leaf)] = (leaf, made)
        return self._instead[id(leaf)][1]

    # --- what is refused ------------------------------------------------------------------------------

    def _require_one_dtype(self, name: str, given: list[torch.Tensor]) -> None:
        if name not in ONE_DTYPE and name not in NORMS:
            return
        dtypes = _floating(given)
        if len(dtypes) < 2:
            return
        if name in NORMS:
            first, *others = [tensor.dtype for tensor in given if tensor.is_floating_point()]
            if all(torch.promote_types(first, dtype) is dtype for dtype in others):
                return
            self.refuse(name, dtypes, "its parameters must not be narrower than what it norms")
        self.refuse(name, dtypes, "its operands must have one dtype")

    def refuse(self, name: str, dtypes: list[str], why: str) -> None:
        (path, _), line, _ = self._place()
        asked = self.call.name if not self.backward else ""
        told = asked if asked and asked.isidentifier() and not asked.startswith("_") else name.strip("_")
        self.refused = Refusal(path, told, tuple(dtypes), why, line, self.backward)
        raise RefusedError(told)

    # --- what is written down -------------------------------------------------------------------------

    def _place(self) -> tuple[tuple[str, int], str, CastBy]:
        """(module and call, line of the model's code, what of the engine asks for it)."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            number = bisect.bisect_right(self._nodes, node._sequence_nr())
            path, call, line = self._made[number] if number < len(self._made) else ("", 0, "")
            return (path, call), line, "autograd"
        line, by = place_of_code()
        return self._paths.call, line, by

    def _write_down(self, name: str, given: list[torch.Tensor], out: Any, flops: int) -> None:
        if self.backward:
            node = torch._C._current_autograd_node()
            adds = node is not None and node.name() == "torch::autograd::AccumulateGrad"
            if self._paths.inside or adds:
                return  # a forward that is computed again, or a gradient on its way into the engine's sum
        (path, call), line, by = self._place()
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        cast: CastBy = ""
        if name == "_to_copy" and given and outputs and given[0].dtype is not outputs[0].dtype:
            own = self.call.cast_by()
            cast = own if not by or (by == "a pin" and own == "the model") else by
        elif name == "copy_" and len({tensor.dtype for tensor in given}) > 1:
            cast = by or "the model"
        else:
            self.call.computed = True
        self.operations.append(
            TracedOperation(
                module=path,
                call=call,
                name=name,
                inputs=tuple(map(self._traced, given)),
                outputs=tuple(map(self._traced, outputs)),
                line=line,
                backward=self.backward,
                cast_by=cast,
                flops=flops,
            )
        )
        if not self.backward:
            newest = torch._C._autograd._get_sequence_nr()
            if not self._nodes or newest > self._nodes[-1]:
                # Nodes are numbered before their operation runs: this is the number after it.
                self._nodes.append(newest)
                self._made.append((path, call, line))

    def _traced(self, tensor: torch.Tensor) -> TracedTensor:
        known = from_torch(tensor.dtype)
        dtype = str(known) if known is not None else str(tensor.dtype).removeprefix("torch.")
        return TracedTensor(self.memory(tensor), dtype, tensor.dim(), tensor.numel() * tensor.itemsize)


OperationRecorder.__torch_dispatch__ = inspect.unwrap(OperationRecorder.__torch_dispatch__)  # type: ignore[method-assign]


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation's result on tensors without values. That form of a grouped product takes bf16
    alone; the operation takes the others, too."""
    if name_of(func) != "_grouped_mm" or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    dtype = args[0].dtype
    narrow = [
        torch.empty_strided(t.size(), t.stride(), dtype=torch.bfloat16, device=t.device) for t in args[:2]
    ]
    return torch.empty_like(func(*narrow, *args[2:], **kwargs), dtype=dtype)


def name_of(func: Any) -> str:
    name: str = func.overloadpacket.__name__
    return name


def _keeps_values(tensor: torch.Tensor) -> bool:
    """Whole numbers and single ones, of which a model may ask what they are."""
    return _is_whole(tensor) or tensor.dim() == 0


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _floating(given: list[torch.Tensor]) -> list[str]:
    """The floating dtypes among operands, each once."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in given if tensor.is_floating_point())
    return [str(from_torch(dtype) or dtype) for dtype in dtypes]
