"""Run operations on tensors without values, and write each down for a dry run.

Private in torch (2.13): `torch._subclasses.fake_tensor`, autograd's node and its number.

[Note: mixed dtypes] torch's forms of operations for tensors without values do not all refuse what the
operations refuse. So the operations that refuse operands of several floating dtypes on a CPU are listed here,
and a test compares the list with torch.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from zerodrift.dtypes import from_torch
from zerodrift.inspect.trace.operations import VIEWS, every_operation, flops_of, name_of
from zerodrift.inspect.trace.places import ModulePaths, place_of_code
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.plan import CastBy, Refusal, TracedOperation, TracedTensor

DEVICE = "cpu"  # autocast's lists of other devices differ in a few operations
VALUES_NEEDED = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
SMALL = 1 << 16  # elements up to which whole numbers keep their values

ONE_DTYPE = frozenset((  # see [Note: mixed dtypes]
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "convolution", "_grouped_mm",
    "linalg_cross", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_",
    "_unsafe_index_put", "_index_put_impl_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "masked_scatter", "masked_scatter_", "_embedding_bag", "grid_sampler_2d", "grid_sampler_3d", "polar",
    "complex", "nll_loss_forward", "nll_loss2d_forward", "_cdist_forward",
    "_linalg_solve_ex",
))  # fmt: skip

NORMS = frozenset(("native_layer_norm", "native_batch_norm", "native_group_norm", "_native_batch_norm_legit"))
"""Norms, whose parameters may be wider than their input, and not narrower."""

_COMPUTES_NOTHING = VIEWS | frozenset((
    "diagonal", "movedim", "real", "unfold", "view_as_complex", "view_as_real", "_conj", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size", "_local_scalar_dense",
    "equal", "set_", "resize_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_",
))  # fmt: skip
"""Operations that are not written down."""

_SAYS_CAST = frozenset((
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "copy_", "__setitem__",
    "tensor", "as_tensor", "asarray", "softmax", "log_softmax", "sum", "mean", "prod", "cumsum", "cumprod",
    "norm",
))  # fmt: skip
"""Calls by which a model itself asks for a dtype: their casts are not autocast's."""


class RefusedError(RuntimeError):
    """An operation that torch would refuse, with an error of this kind."""


@dataclass(slots=True)
class _FunctionCall:
    """One of torch's functions, as it is called in Python."""

    name: str = ""
    autocast: bool = False
    computed: bool = False  # whether an operation of it has run that is no cast: autocast casts before

    def cast_by(self) -> CastBy:
        if not self.name or self.name in _SAYS_CAST:
            return "the model"
        return "autocast" if self.autocast and not self.computed else "torch"


class FunctionCalls(TorchFunctionMode):
    """Tells a recorder which of torch's functions Python calls, and whether autocast is on."""

    def __init__(self, recorder: FakeRecorder) -> None:
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
        except RuntimeError as error:  # a check of the function, before it runs an operation
            dtypes = _floating_dtypes(_tensors((args, kwargs)))
            if len(dtypes) > 1 and "type" in str(error).lower():
                recorder.refuse(name, dtypes, str(error).splitlines()[0])
            raise
        finally:
            recorder.call = before


class FakeRecorder:
    """Runs every operation without values, and writes it down."""

    def __init__(self, fake: FakeTensorMode, paths: ModulePaths) -> None:
        self._fake, self._paths = fake, paths
        self.operations: list[TracedOperation] = []
        self.backward = False
        self.call = _FunctionCall()
        self.refused: Refusal | None = None
        self.failed: tuple[tuple[str, int], str, CastBy] | None = None
        """The place of an operation that raised."""
        self._storages: list[Any] = []  # held, so that no number comes again; they have no memory
        self._numbers: dict[int, int] = {}
        self._unknown: set[int] = set()  # storages of numbers that were known, and were written to since
        self._instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Id of a tensor -> the tensor and its form without values."""
        self._nodes: list[int] = []
        self._made: list[tuple[str, int, str]] = []
        """Numbers of autograd's nodes, ascending, and the module, call and line that made each."""

    def mode(self) -> TorchDispatchMode:
        return every_operation(self._write_down, compiled=False, run=self._run)

    def memory(self, tensor: torch.Tensor) -> int:
        whole: Any = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
        key = whole._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._storages)
            self._storages.append(whole)
        return self._numbers[key]

    def held(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer in a dtype: with its values if they are whole numbers, else without."""
        if not tensor.is_meta and _keeps_values(tensor):
            return tensor.to(DEVICE, dtype)
        is_same = dtype is tensor.dtype and tensor.device.type == DEVICE
        return self._faked(tensor) if is_same else self._empty(tensor, dtype)

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked for at every step of torch's own code
        given, name = _tensors((args, kwargs)), name_of(func)
        if given and all(map(self._is_known, given)):
            results = func(*args, **kwargs)
            return tree_map(lambda leaf: leaf if _keeps_values(leaf) else self._faked(leaf), results)
        if name == "_local_scalar_dense" and not isinstance(given[0], FakeTensor) and not given[0].is_meta:
            return func(*args, **kwargs)
        self._require_one_dtype(name, given)
        if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
            indices: list[Any] = []
            for index in args[1]:  # a known mask is the places that it has
                mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and self._is_known(index)
                indices += index.nonzero(as_tuple=True) if mask else [index]
            args = (args[0], indices, *args[2:])
        is_plain = name in ("lift_fresh", "lift_fresh_copy") or all(isinstance(t, FakeTensor) for t in given)
        instead = (args, kwargs) if is_plain else tree_map(self._faked, (args, kwargs))
        try:
            with self._fake:
                out = _shaped(func, *instead)
        except (RuntimeError, TypeError) as error:
            dtypes = _floating_dtypes(given)
            if len(dtypes) > 1 and ("dtype" in str(error) or "scalar type" in str(error)):
                self.refuse(name, dtypes, str(error).splitlines()[0])
            self.failed = self._place()
            raise
        except (*VALUES_NEEDED, fake_tensor.UnsupportedOperatorException):
            self.failed = self._place()
            raise
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for leaf in _tensors(args[place] if place < len(args) else kwargs.get(argument.name)):
                        if self._is_known(leaf):
                            self._unknown.add(leaf.untyped_storage()._cdata)
            stands_for = {id(new): old for old, new in self._instead.values()}
            out = tree_map(lambda leaf: stands_for.get(id(leaf), leaf), out)
        if not given and isinstance(out, FakeTensor) and _keeps_values(out) and out.numel() <= SMALL:
            return func(*args, **kwargs)
        return out

    def _is_known(self, tensor: torch.Tensor) -> bool:
        is_real = not isinstance(tensor, FakeTensor) and not tensor.is_meta
        return is_real and _keeps_values(tensor) and tensor.untyped_storage()._cdata not in self._unknown

    def _faked(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._instead:
            if leaf.is_meta:
                made = self._empty(leaf, leaf.dtype)
            else:
                with torch.no_grad():
                    made = self._fake.from_tensor(leaf.detach(), static_shapes=True)
            self._instead[id(leaf)] = (leaf, made)
        return self._instead[id(leaf)][1]

    def _empty(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with self._fake:
            return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=DEVICE)

    def _require_one_dtype(self, name: str, given: list[torch.Tensor]) -> None:
        dtypes = _floating_dtypes(given) if name in ONE_DTYPE or name in NORMS else []
        if len(dtypes) < 2:
            return
        if name in NORMS:
            first, *others = [tensor.dtype for tensor in given if tensor.is_floating_point()]
            if all(torch.promote_types(first, dtype) is dtype for dtype in others):
                return
            self.refuse(name, dtypes, "its parameters must not be narrower than what it norms")
        self.refuse(name, dtypes, "its operands must have one dtype")

    def refuse(self, name: str, dtypes: list[str], why: str) -> None:
        """Record a refusal under the name that Python calls, and raise."""
        (path, _), line, _ = self._place()
        called = self.call.name if not self.backward else ""
        is_public = called.isidentifier() and not called.startswith("_")
        shown = called if is_public else name.strip("_")
        self.refused = Refusal(path, shown, tuple(dtypes), why, line, self.backward)
        raise RefusedError(shown)

    def _place(self) -> tuple[tuple[str, int], str, CastBy]:
        """Return module and call, line of the model's code, and who in the engine asks for the operation."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            number = bisect.bisect_right(self._nodes, node._sequence_nr())
            path, call, line = self._made[number] if number < len(self._made) else ("", 0, "")
            return (path, call), line, "autograd"
        line, by = place_of_code()
        return self._paths.call, line, by

    def _write_down(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = name_of(func)
        if name in _COMPUTES_NOTHING or func.namespace == "prim":
            return
        if self.backward:
            node = torch._C._current_autograd_node()
            adds = node is not None and node.name() == "torch::autograd::AccumulateGrad"
            if self._paths.inside or adds:
                return  # a forward that is computed again, or a gradient on its way into the engine's sum
        given, outputs = _tensors((args, kwargs or {})), _tensors(out)
        (path, call), line, by = self._place()
        cast: CastBy = ""
        if name == "_to_copy" and given and outputs and given[0].dtype is not outputs[0].dtype:
            own = self.call.cast_by()
            cast = own if not by or (by == "a pin" and own == "the model") else by
        elif name == "copy_" and len({tensor.dtype for tensor in given}) > 1:
            cast = by or "the model"
        else:
            self.call.computed = True
        inputs, results = tuple(map(self._traced, given)), tuple(map(self._traced, outputs))
        flops = flops_of(func, args, kwargs, out)
        made = TracedOperation(path, call, name, inputs, results, line, self.backward, cast, flops)
        self.operations.append(made)
        newest = -1 if self.backward else torch._C._autograd._get_sequence_nr()
        if not self.backward and (not self._nodes or newest > self._nodes[-1]):
            # Nodes are numbered before their operation runs: this is the number after it.
            self._nodes.append(newest)
            self._made.append((path, call, line))

    def _traced(self, tensor: torch.Tensor) -> TracedTensor:
        dtype = str(from_torch(tensor.dtype) or dtype_name(tensor.dtype))
        return TracedTensor(self.memory(tensor), dtype, tensor.dim(), tensor.numel() * tensor.itemsize)


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a result without values. torch's form of a grouped product takes bf16 alone there."""
    if name_of(func) != "_grouped_mm" or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    of: Any = {"dtype": torch.bfloat16, "device": args[0].device}
    narrow = [torch.empty_strided(tensor.size(), tensor.stride(), **of) for tensor in args[:2]]
    return torch.empty_like(func(*narrow, *args[2:], **kwargs), dtype=args[0].dtype)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _keeps_values(tensor: Any) -> bool:
    """Return True for whole numbers and single ones, which a model may look at, and for what is no tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return True
    return not (tensor.is_floating_point() or tensor.is_complex())


def _floating_dtypes(given: list[torch.Tensor]) -> list[str]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in given if tensor.is_floating_point())
    return [str(from_torch(dtype) or dtype) for dtype in dtypes]
