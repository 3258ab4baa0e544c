"""Run one forward and backward of a model under a plan, on tensors without values.

Parameters and buffers have the dtypes of the plan, and the engine's own code casts. There are no ranks,
because collectives do not change the dtypes that operations compute in. Private in torch (2.13):
`torch._subclasses.fake_tensor`, autograd's node and its number.

[Note: mixed dtypes] On tensors without values, torch runs some operations that it refuses on real ones. So
the operations that refuse operands of several floating dtypes on a CPU are listed here, and a test compares
the list with torch.

Invariant: nothing is computed from weights. Whole numbers and single numbers that do not depend on weights
keep their values, so that code may read them. An error names the code that reads any other value.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from zerodrift.dtypes import from_torch
from zerodrift.engine import compute, pins, products, tensors_in, tie
from zerodrift.errors import ModelError, said
from zerodrift.inspect.trace import operations
from zerodrift.inspect.trace.records import dtype_name
from zerodrift.model import Inputs
from zerodrift.plan import CastBy, Plan, Refusal, Trace, TracedOperation, TracedTensor
from zerodrift.policy import Mode

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

_COMPUTES_NOTHING = operations.VIEWS | frozenset((
    "diagonal", "movedim", "real", "unfold", "view_as_complex", "view_as_real", "_conj", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size", "_local_scalar_dense",
    "equal", "set_", "resize_", "detach_", "t_", "transpose_", "squeeze_", "unsqueeze_",
))  # fmt: skip
"""Operations that are not recorded."""

_SAYS_CAST = frozenset((
    "to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "copy_", "__setitem__",
    "tensor", "as_tensor", "asarray", "softmax", "log_softmax", "sum", "mean", "prod", "cumsum", "cumprod",
    "norm",
))  # fmt: skip
"""Functions by which a model asks for a dtype. Their casts are the model's, not autocast's."""


class RefusedError(RuntimeError):
    """An operation that torch would refuse, with an error of this kind."""


@dataclass(slots=True)
class _FunctionCall:
    """One call of a torch function in Python."""

    name: str = ""
    autocast: bool = False
    computed: bool = False  # whether an operation has run that is no cast; autocast casts before it

    def cast_by(self) -> CastBy:
        if not self.name or self.name in _SAYS_CAST:
            return "the model"
        return "autocast" if self.autocast and not self.computed else "torch"


class FakeRecorder(TorchFunctionMode):
    """Runs every operation without values, and records it with the torch function that was called."""

    def __init__(self, fake: FakeTensorMode, paths: operations.ModulePaths) -> None:
        super().__init__()
        self._fake, self._paths = fake, paths
        self.operations: list[TracedOperation] = []
        self.backward = False
        self.call = _FunctionCall()
        self.refused: Refusal | None = None
        self.failed: tuple[tuple[str, int], str, CastBy] | None = None
        """The place of an operation that raised."""
        self._storages: list[Any] = []  # kept alive, so that numbers stay unique; they have no memory
        self._numbers: dict[int, int] = {}
        self._unknown: set[int] = set()  # storages of known numbers that were overwritten
        self._instead: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Id of a tensor -> the tensor and its form without values."""
        self._nodes: list[int] = []
        self._made: list[tuple[str, int, str]] = []
        """Module, call and line of each of autograd's nodes in `_nodes`, which are in ascending order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            return func(*args, **(kwargs or {}))
        before, self.call = self.call, _FunctionCall(name, torch.is_autocast_enabled(DEVICE))
        try:
            return func(*args, **(kwargs or {}))
        except RefusedError:
            raise
        except RuntimeError as error:  # raised by the function before it runs an operation
            dtypes = _floating_dtypes(operations.tensors_of((args, kwargs)))
            if len(dtypes) > 1 and "type" in str(error).lower():
                self.refuse(name, dtypes, str(error).splitlines()[0])
            raise
        finally:
            self.call = before

    def memory(self, tensor: torch.Tensor) -> int:
        whole: Any = tensor.untyped_storage() if tensor.layout is torch.strided else tensor
        key = whole._cdata
        if key not in self._numbers:
            self._numbers[key] = len(self._storages)
            self._storages.append(whole)
        return self._numbers[key]

    def held(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer in a dtype, with its values only if they are whole numbers."""
        if not tensor.is_meta and _keeps_values(tensor):
            return tensor.to(DEVICE, dtype)
        is_same = dtype is tensor.dtype and tensor.device.type == DEVICE
        return self._faked(tensor) if is_same else self._empty(tensor, dtype)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # torch's own code calls this often
        given, name = operations.tensors_of((args, kwargs)), operations.name_of(func)
        if given and all(map(self._is_known, given)):
            results = func(*args, **kwargs)
            return tree_map(lambda leaf: leaf if _keeps_values(leaf) else self._faked(leaf), results)
        if name == "_local_scalar_dense" and not isinstance(given[0], FakeTensor) and not given[0].is_meta:
            return func(*args, **kwargs)
        mixed = _floating_dtypes(given) if name in ONE_DTYPE or name in NORMS else []
        if len(mixed) > 1 and name in ONE_DTYPE:
            self.refuse(name, mixed, "its operands must have one dtype")
        if len(mixed) > 1:
            first, *others = [tensor.dtype for tensor in given if tensor.is_floating_point()]
            if any(torch.promote_types(first, dtype) is not dtype for dtype in others):
                self.refuse(name, mixed, "its parameters must not be narrower than its input")
        if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
            indices: list[Any] = []
            for index in args[1]:  # replace a known mask by its places
                mask = isinstance(index, torch.Tensor) and index.dtype is torch.bool and self._is_known(index)
                indices += index.nonzero(as_tuple=True) if mask else [index]
            args = (args[0], indices, *args[2:])
        instead = (args, kwargs)
        if name not in ("lift_fresh", "lift_fresh_copy"):
            instead = tree_map(self._faked, instead)
        try:
            with self._fake:
                out = _shaped(func, *instead)
        except (RuntimeError, TypeError) as error:
            dtypes = _floating_dtypes(given)
            if len(dtypes) > 1 and ("dtype" in str(error) or "scalar type" in str(error)):
                self.refuse(name, dtypes, str(error).splitlines()[0])
            self.failed = self._place()
            raise
        if func._schema.is_mutable:
            for place, argument in enumerate(func._schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written = args[place] if place < len(args) else kwargs.get(argument.name)
                    known = filter(self._is_known, operations.tensors_of(written))
                    self._unknown.update(leaf.untyped_storage()._cdata for leaf in known)
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

    def refuse(self, name: str, dtypes: list[str], why: str) -> None:
        """Record a refusal under the name of the Python function, and raise."""
        (path, _), line, _ = self._place()
        called = "" if self.backward else self.call.name
        shown = called if called.isidentifier() and not called.startswith("_") else name.strip("_")
        self.refused = Refusal(path, shown, tuple(dtypes), why, line, self.backward)
        raise RefusedError(shown)

    def _place(self) -> tuple[tuple[str, int], str, CastBy]:
        """Return module and call, line of the model's code, and who in the engine asks for the operation."""
        node = torch._C._current_autograd_node() if self.backward else None
        if node is not None:
            number = bisect.bisect_right(self._nodes, node._sequence_nr())
            path, call, line = self._made[number] if number < len(self._made) else ("", 0, "")
            return (path, call), line, "autograd"
        line, by = operations.place_of_code()
        return self._paths.call, line, by

    def write_down(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = operations.name_of(func)
        if name in _COMPUTES_NOTHING or func.namespace == "prim":
            return
        if self.backward:
            node = torch._C._current_autograd_node()
            adds = node is not None and node.name() == "torch::autograd::AccumulateGrad"
            if self._paths.inside or adds:
                return  # a recomputed forward, or the addition of a gradient
        given, outputs = operations.tensors_of((args, kwargs or {})), operations.tensors_of(out)
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
        flops = operations.flops_of(func, args, kwargs, out) or 0
        made = TracedOperation(path, call, name, inputs, results, line, self.backward, cast, flops)
        self.operations.append(made)
        newest = -1 if self.backward else torch._C._autograd._get_sequence_nr()
        if not self.backward and (not self._nodes or newest > self._nodes[-1]):
            # A node gets its number before its operation runs; this is the next number.
            self._nodes.append(newest)
            self._made.append((path, call, line))

    def _traced(self, tensor: torch.Tensor) -> TracedTensor:
        dtype = str(from_torch(tensor.dtype) or dtype_name(tensor.dtype))
        return TracedTensor(self.memory(tensor), dtype, tensor.dim(), tensor.numel() * tensor.itemsize)


def _shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a result without values. torch's grouped product takes only bf16 there."""
    if operations.name_of(func) != "_grouped_mm" or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    of: Any = {"dtype": torch.bfloat16, "device": args[0].device}
    narrow = [torch.empty_strided(tensor.size(), tensor.stride(), **of) for tensor in args[:2]]
    return torch.empty_like(func(*narrow, *args[2:], **kwargs), dtype=args[0].dtype)


def _keeps_values(tensor: Any) -> bool:
    """Return True for whole numbers, single numbers, and anything that is no tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        return True
    return not (tensor.is_floating_point() or tensor.is_complex())


def _floating_dtypes(given: list[torch.Tensor]) -> list[str]:
    dtypes = dict.fromkeys(tensor.dtype for tensor in given if tensor.is_floating_point())
    return [str(from_torch(dtype) or dtype) for dtype in dtypes]


def trace(plan: Plan, model: nn.Module, inputs: Inputs) -> Trace:
    """Record the operations of a step, with their dtypes. The model has no values afterwards."""
    run, before = _DryRun(plan, model), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # warnings would be about real runs
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with run.prepared(), torch.device(DEVICE):  # whatever the default device is
                return run.step(inputs)
    finally:
        logging.disable(before)


class _DryRun:
    """A model with the parameters that an engine would have, and its one step."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._paths = operations.ModulePaths(model)
        self._recorder = FakeRecorder(self._fake, self._paths)
        self._precision = compute.ForwardPrecision(plan, torch.device(DEVICE))
        self._parameters: dict[int, str] = {}
        self._kept: dict[int, str] = {}

    @contextlib.contextmanager
    def prepared(self) -> Iterator[None]:
        """Replace parameters and buffers, and put the engine's hooks around modules."""
        self._replace_parameters()
        dtypes = {row.name: row.storage.torch for row in self._plan.buffers}
        for path, module in self._model.named_modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                dtype = dtypes.get(f"{path}.{name}" if path else name, buffer.dtype)
                setattr(module, name, self._recorder.held(buffer, dtype))
        handles = [*self._paths.enter(), *compute.attach(self._model, self._plan.boundaries)]
        handles += [*self._watch_kept(), *self._paths.leave()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _replace_parameters(self) -> None:
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
                for name in row.names:
                    path, _, attribute = name.rpartition(".")
                    setattr(self._model.get_submodule(path), attribute, instead)
                parameter = instead
            else:
                torch.utils.swap_tensors(parameter, instead)
            self._parameters[self._recorder.memory(parameter)] = row.name
            if row.columns.pinned and holds and parameter.is_floating_point():
                parameter.__class__ = pins.class_for(row.name, row.columns.output, FakeTensor)
            elif row.columns.products is not None:
                parameter.__class__ = products.class_for(row.name, row.columns.products, FakeTensor)

    def _watch_kept(self) -> Iterator[Any]:
        """Hook on pinned modules whose output keeps the pin's dtype, as the plan says."""

        def note(path: str, module: nn.Module, args: Any, output: Any) -> None:
            for tensor in tensors_in(output):
                if isinstance(tensor, FakeTensor) and tensor.is_floating_point():
                    self._kept.setdefault(self._recorder.memory(tensor), path)

        modules = dict(self._model.named_modules(remove_duplicate=False))
        pinned = {n.rpartition(".")[0] for row in self._plan.rows if row.columns.pinned for n in row.names}
        for boundary in self._plan.boundaries:
            inside = any(path == boundary.path or path.startswith(f"{boundary.path}.") for path in pinned)
            if inside and boundary.output == "keep":
                yield modules[boundary.path].register_forward_hook(functools.partial(note, boundary.path))

    def step(self, inputs: Inputs) -> Trace:
        recorder, loss, refused = self._recorder, "", None
        try:
            calls = operations.every_operation(recorder.write_down, compiled=False, run=recorder.run)
            with recorder, calls:
                here = (inputs.args, inputs.kwargs)
                given = tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to(DEVICE), here)
                with self._precision.forward(), self._precision.cast(given) as (args, kwargs):
                    output = self._model(*args, **kwargs)
                root, loss = _loss(output)
                if root is not None:
                    recorder.backward = True
                    with self._precision.backward():
                        root.backward()
        except RefusedError:
            refused = recorder.refused
        except (Exception, SystemExit) as error:
            raise self._error(error) from error
        classes = {path: type(module).__name__ for path, module in self._model.named_modules()}
        ran, names = tuple(recorder.operations), self._parameters
        return Trace(DEVICE, inputs.words, loss, ran, classes, names, self._kept, refused)

    def _error(self, error: BaseException) -> ModelError:
        if isinstance(error, ModelError):
            return error
        path, line = self._paths.failed or self._paths.current, operations.line_of(error)
        if self._recorder.backward and self._recorder.failed is not None:
            (path, _), line, _ = self._recorder.failed
        where = f"{path or 'model'} ({type(self._model.get_submodule(path)).__name__})"
        at = f"{' in its backward' if self._recorder.backward else ''}{f' at {line}' if line else ''}"
        must, got = "must run on tensors without values", said(error).rstrip(".")
        do = "Can the model be called with these inputs? `--inputs package.module:function` passes others."
        if isinstance(error, VALUES_NEEDED):
            name = operations.name_of(error.func).strip("_")
            must = "must not depend on values, because a trace has none"
            got = _LOOKS.get(name, f"`{name}`")
            do = (
                "Write it with operations of one shape (`torch.where`, a multiplication by the mask), or see "
                "what a real step does with `zerodrift check`."
            )
            if "expert" in path:
                do += ' Experts of `transformers` need `experts_implementation="grouped_mm"`.'
        elif isinstance(error, fake_tensor.UnsupportedOperatorException):
            must, got = "must run operations that work without values", f"`{error.func}`"
            do = "Register a fake form of it."
        return ModelError(where, must, got=got + at, do=do)


_LOOKS = {
    "local_scalar_dense": "one number of a tensor, as `.item()`, `int(...)` and `if tensor:` ask for it",
    "nonzero": "which elements are not zero, as `nonzero`, `where` and indices by a mask ask for it",
    "unique2": "`unique`",
}


def _loss(output: Any) -> tuple[torch.Tensor | None, str]:
    """Return the number at which a backward begins, and its description."""
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, torch.Tensor) and own.requires_grad and own.dim() == 0:
        return own, "the model's own"
    floating = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    for single in (tensor for tensor in floating if tensor.dim() == 0):
        return single, "the first output that is one number"
    if not floating:
        return None, ""
    sums = [tensor.sum() for tensor in floating]
    return functools.reduce(torch.add, sums), "the sum of what the model returns"
