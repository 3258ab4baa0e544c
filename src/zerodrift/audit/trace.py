"""One forward and backward of a model under a plan, on tensors without values.

    traced = trace(plan, model, Inputs((), {"input_ids": ids, "labels": ids}, "..."))

Parameters have the dtype of their `compute` column, buffers that of their row, and what casts is what casts
in an engine: the hooks of `engine/compute.py` at the plan's boundaries, the classes of `engine/pins.py`, the
contexts of `ForwardPrecision`. There are no weights, no ranks and no process group; what is gathered and sent
has no part in what operations compute in. Every operation is written down where autograd and autocast have
done their work.

Invariant: nothing is computed from weights. Numbers that do not depend on them keep their values where they
are whole or single (token ids, positions, masks, a constant), so that code may look at them; whoever looks at
others is named in an error.

`torch._subclasses.fake_tensor` is private, and so are autograd's node and its number that are asked for here.
Tested with torch 2.13.

[Note: mixed dtypes] torch's forms of operations for tensors without values do not all refuse what the
operations refuse. So what refuses operands of several floating dtypes on a CPU is listed here, and a test
compares the list with torch.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import inspect
import logging
import os
import sys
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
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

from zerodrift.audit.operations import VIEWS
from zerodrift.dtypes import from_torch
from zerodrift.engine import compute, pins
from zerodrift.engine.nested import tensors_in
from zerodrift.engine.place import tie
from zerodrift.errors import ModelError, said
from zerodrift.model.inputs import Inputs
from zerodrift.plan.table import Plan, Row
from zerodrift.plan.traced import CastBy, Refusal, Trace, TracedOperation, TracedTensor
from zerodrift.policy.nouns import Mode

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


def trace(plan: Plan, model: nn.Module, inputs: Inputs) -> Trace:
    """What operations run in which dtypes. The model is used up: its parameters have no values afterwards."""
    run = _Run(plan, model)
    with _quiet(), run.prepared():
        return run.step(inputs)


class _RefusedError(RuntimeError):
    """An operation that torch would refuse, with an error of this kind."""


class _Run:
    """A model that was made ready, and its one step."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._paths = _Paths(model)
        self._recorder = _OperationRecorder(self._fake, self._paths)
        self._precision = compute.ForwardPrecision(plan, torch.device(DEVICE))
        self._parameters: dict[int, str] = {}
        self._kept: dict[int, str] = {}

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Parameters and buffers as an engine has them, without values; the engine's hooks around modules."""
        self._place()
        handles = [*self._paths.enter(), *compute.attach(self._model, self._plan.boundaries)]
        handles += self._watch_kept()
        handles += self._paths.leave()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _place(self) -> None:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        missing = [row.name for row in self._plan.rows if row.name not in parameters]
        if missing:
            must, do = "must be a parameter of the model, as planned", "Plan from the module that is traced."
            raise ModelError(missing[0], must, got="no such parameter", do=do)
        tie(self._plan, self._model, parameters)
        policy = self._plan.policy
        holds = policy.backend == "native" and policy.mode is not Mode.FP32  # as its engine has it
        for row in self._plan.rows:
            parameter: Any = parameters[row.name]
            trained = row.trained and row.columns.compute.is_floating
            # The same object, wherever else it is held. `nn.Parameter(fake)` has references of torch's to it.
            shape = torch.empty(row.whole_shape, dtype=row.columns.compute.torch, device="meta")
            instead: Any = FakeTensor(self._fake, shape, torch.device(DEVICE))
            instead._is_param = True
            instead.requires_grad_(trained)
            if weakref.getweakrefs(parameter):  # as recurrent modules have to theirs
                self._put(row, instead)
                parameter = instead
            else:
                torch.utils.swap_tensors(parameter, instead)
            self._parameters[self._recorder.memory(parameter)] = row.name
            if row.columns.pinned and holds and parameter.is_floating_point():
                parameter.__class__ = pins.class_for(row, FakeTensor)
        dtypes = {row.name: row.storage.torch for row in self._plan.buffers}
        for path, module in self._model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                dtype = dtypes.get(f"{path}.{name}" if path else name, buffer.dtype)
                setattr(module, name, self._recorder.held(buffer, dtype))

    def _put(self, row: Row, parameter: nn.Parameter) -> None:
        for name in row.names:
            path, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(path), attribute, parameter)

    def _watch_kept(self) -> Iterator[Any]:
        """Hooks that note what leaves a pinned module in the pin's dtype, as the plan says."""
        modules = dict(self._model.named_modules(remove_duplicate=False))
        pinned = {
            path
            for row in self._plan.rows
            if row.columns.pinned
            for name in row.names
            for path in (name.rpartition(".")[0],)
        }
        for boundary in self._plan.boundaries:
            inside = any(path == boundary.path or path.startswith(f"{boundary.path}.") for path in pinned)
            if inside and boundary.output == "keep":
                note = functools.partial(self._note_kept, boundary.path)
                yield modules[boundary.path].register_forward_hook(note)

    def _note_kept(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_in(output):
            if isinstance(tensor, FakeTensor) and tensor.is_floating_point():
                self._kept.setdefault(self._recorder.memory(tensor), path)

    def step(self, inputs: Inputs) -> Trace:
        """One forward and backward."""
        recorder, loss, refused = self._recorder, "", None
        try:
            with _FunctionCalls(recorder), recorder:
                output = self._forward(inputs)
                root, loss = _loss(output)
                if root is not None:
                    recorder.backward = True
                    with self._precision.backward():
                        root.backward()
        except _RefusedError:
            refused = recorder.refused
        except (Exception, SystemExit) as error:
            raise self._error(error) from error
        return Trace(
            device=DEVICE,
            inputs=inputs.words,
            loss=loss,
            operations=tuple(recorder.operations),
            classes={path: type(module).__name__ for path, module in self._model.named_modules()},
            parameters=self._parameters,
            kept=self._kept,
            refused=refused,
        )

    def _forward(self, inputs: Inputs) -> Any:
        """As `Engine.__call__` has it."""
        with self._precision.forward(), self._precision.cast((inputs.args, inputs.kwargs)) as (args, kwargs):
            return self._model(*args, **kwargs)

    def _error(self, error: BaseException) -> ModelError:
        """Whatever went wrong, at the module and the line where it did."""
        path, line = self._paths.failed or self._paths.current[0], _line_of(error)
        if self._recorder.backward and self._recorder.failed is not None:
            (path, _), line, _ = self._recorder.failed
        where = f"{path or 'model'} ({type(self._model.get_submodule(path)).__name__})"
        at = f"{' in its backward' if self._recorder.backward else ''}{f' at {line}' if line else ''}"
        if isinstance(error, ModelError):
            return error
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            name = _name(error.func).strip("_")
            what = _LOOKS.get(name, f"`{name}`")
            must = "must not let values decide what runs, for a trace has none"
            experts = _EXPERTS if "expert" in path else ""
            return ModelError(where, must, got=what + at, do=_LOOK + experts)
        if isinstance(error, UnsupportedOperatorException):
            must = "must run operations that work without values"
            return ModelError(where, must, got=f"`{error.func}`{at}", do="Register a fake form of it.")
        must = "must run on tensors without values"
        return ModelError(where, must, got=said(error).rstrip(".") + at, do=_RUN)


_LOOKS = {
    "local_scalar_dense": "one number of a tensor, as `.item()`, `int(...)` and `if tensor:` ask for it",
    "nonzero": "which elements are not zero, as `nonzero`, `where` and indices by a mask ask for it",
    "unique2": "`unique`",
}
_LOOK = (
    "Write it with operations of one shape (`torch.where`, a multiplication by the mask), or see what a real "
    "step does with `zerodrift check`."
)
_EXPERTS = ' Experts of `transformers` need `experts_implementation="grouped_mm"`.'
_RUN = "Is it what the model can be called with? `--inputs package.module:function` gives others."


def _loss(output: Any) -> tuple[torch.Tensor | None, str]:
    """What a backward begins at, and how that is told."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    floating = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    if isinstance(own, torch.Tensor) and own.requires_grad and own.dim() == 0:
        return own, "the model's own"
    if not floating:
        return None, ""
    first = next((tensor for tensor in floating if tensor.dim() == 0), None)
    if first is not None:
        return first, "the first output that is one number"
    sums = [tensor.sum() for tensor in floating]
    return functools.reduce(torch.add, sums), "the sum of what the model returns"


# --- where an operation is ----------------------------------------------------------------------------


class _Paths:
    """Which module's forward is under way, by hooks on every module."""

    def __init__(self, model: nn.Module) -> None:
        scripted = torch.jit.ScriptModule  # which take no hooks: they are part of what calls them
        self._modules = [each for each in model.named_modules() if not isinstance(each[1], scripted)]
        self._stack: list[tuple[str, int]] = []
        self._calls: dict[str, int] = {}
        self.failed = ""
        """Path of the innermost module that raised."""

    @property
    def current(self) -> tuple[str, int]:
        return self._stack[-1] if self._stack else ("", 0)

    @property
    def inside(self) -> bool:
        return bool(self._stack)

    def enter(self) -> Iterator[Any]:
        """To be before whatever else is around a module."""
        for path, module in self._modules:
            yield module.register_forward_pre_hook(functools.partial(self._enter, path), prepend=True)

    def leave(self) -> Iterator[Any]:
        """To be after whatever else is around it."""
        for path, module in self._modules:
            yield module.register_forward_hook(functools.partial(self._leave, path), always_call=True)

    def _enter(self, path: str, module: nn.Module, args: Any) -> None:
        self.failed = ""
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        self._stack.append((path, call))

    def _leave(self, path: str, module: nn.Module, args: Any, output: Any) -> None:
        if sys.exc_info()[0] is not None and not self.failed:
            self.failed = path
        self._stack.pop()


_TORCH = os.path.dirname(torch.__file__) + os.sep
_ENGINE = os.path.dirname(compute.__file__) + os.sep
_CASTING: dict[str, CastBy] = {compute.__file__: "a boundary", pins.__file__: "a pin"}


@functools.cache
def _is_the_models(file: str) -> bool:
    own = file.startswith((_TORCH, _ENGINE, os.path.dirname(__file__) + os.sep, "<"))
    return not own and os.path.basename(file) != "contextlib.py"


def _told(file: str, line: int) -> str:
    return f"{os.path.basename(file)}:{line}"


def _line_of(error: BaseException) -> str:
    """Of the innermost frame that is the model's code."""
    found, trace_back = "", error.__traceback__
    while trace_back is not None:
        frame = trace_back.tb_frame
        if _is_the_models(frame.f_code.co_filename):
            found = _told(frame.f_code.co_filename, trace_back.tb_lineno)
        trace_back = trace_back.tb_next
    return found


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


class _FunctionCalls(TorchFunctionMode):
    """Which of torch's functions is called, as it is written in Python, and whether autocast is on then."""

    def __init__(self, recorder: _OperationRecorder) -> None:
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
        except _RefusedError:
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


# --- the operations -----------------------------------------------------------------------------------


class _OperationRecorder(TorchDispatchMode):
    """Runs every operation without values, and writes it down."""

    def __init__(self, fake: FakeTensorMode, paths: _Paths) -> None:
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
        name = _name(func)
        if given and all(map(self._is_known, given)):
            out = tree_map(self._without_value, func(*args, **kwargs))
        elif name == "_local_scalar_dense" and not isinstance(given[0], FakeTensor) and not given[0].is_meta:
            return func(*args, **kwargs)
        else:
            self._require_one_dtype(name, given)
            out = self._run(func, args, kwargs, given)
        if name not in COMPUTES_NOTHING and func.namespace != "prim":
            self._write_down(name, given, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> Any:
        """The operation without values."""
        name = _name(func)
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
        raise _RefusedError(told)

    # --- what is written down -------------------------------------------------------------------------

    def _place(self) -> tuple[tuple[str, int], str, CastBy]:
        """(module and call, line of the model's code, what of the engine asks for it)."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            number = bisect.bisect_right(self._nodes, node._sequence_nr())
            path, call, line = self._made[number] if number < len(self._made) else ("", 0, "")
            return (path, call), line, "autograd"
        by: CastBy = ""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and not _is_the_models(frame.f_code.co_filename):
            by = by or _CASTING.get(frame.f_code.co_filename, "")
            frame = frame.f_back
        line = _told(frame.f_code.co_filename, frame.f_lineno) if frame is not None else ""
        return self._paths.current, line, by

    def _write_down(self, name: str, given: list[torch.Tensor], out: Any) -> None:
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
        return TracedTensor(self.memory(tensor), dtype, tensor.dim())


_OperationRecorder.__torch_dispatch__ = inspect.unwrap(_OperationRecorder.__torch_dispatch__)  # type: ignore[method-assign]


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """An operation's result on tensors without values. That form of a grouped product takes bf16
    alone; the operation takes the others, too."""
    if _name(func) != "_grouped_mm" or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    dtype = args[0].dtype
    narrow = [
        torch.empty_strided(t.size(), t.stride(), dtype=torch.bfloat16, device=t.device) for t in args[:2]
    ]
    return torch.empty_like(func(*narrow, *args[2:], **kwargs), dtype=dtype)


def _name(func: Any) -> str:
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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch and libraries say of a run that is none; the same random numbers every time."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        logging.disable(before)
