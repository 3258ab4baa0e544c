"""Run one forward and backward of a model under a plan, on tensors without values.

traced = trace(plan, model, Inputs((), {"input_ids": ids, "labels": ids}, "..."))

Parameters and buffers have the dtypes of the plan, and the engine's own code casts. There are no weights and
no ranks: collectives do not change the dtypes that operations compute in. Every operation is recorded below
autograd and autocast.

Invariant: nothing is computed from weights. Numbers that do not depend on them keep their values if they are
whole or single (token ids, positions, masks, a constant), so that code may look at them. An error names the
code that looks at others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, UnsupportedOperatorException
from torch.utils._pytree import tree_map_only

from zerodrift.engine import compute, pins, products, tensors_in, tie
from zerodrift.errors import ModelError, said
from zerodrift.inspect.trace.fake_run import DEVICE, VALUES_NEEDED, FakeRecorder, FunctionCalls, RefusedError
from zerodrift.inspect.trace.operations import name_of
from zerodrift.inspect.trace.places import ModulePaths, line_of
from zerodrift.model import Inputs
from zerodrift.plan import Plan, Trace
from zerodrift.policy import Mode


def trace(plan: Plan, model: nn.Module, inputs: Inputs) -> Trace:
    """Record the operations of a step, with their dtypes.

    The model is used up: its parameters have no values afterwards.
    """
    run, before = _DryRun(plan, model), logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch and libraries warn about real runs
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            with run.prepared(), torch.device(DEVICE):  # whatever the default device is
                return run.step(inputs)
    finally:
        logging.disable(before)


class _DryRun:
    """A model with parameters as an engine has them, and its one step."""

    def __init__(self, plan: Plan, model: nn.Module) -> None:
        self._plan, self._model = plan, model
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._paths = ModulePaths(model)
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
            with FunctionCalls(recorder), recorder.mode():
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
        operations = tuple(recorder.operations)
        return Trace(DEVICE, inputs.words, loss, operations, classes, self._parameters, self._kept, refused)

    def _error(self, error: BaseException) -> ModelError:
        if isinstance(error, ModelError):
            return error
        path, line = self._paths.failed or self._paths.current, line_of(error)
        if self._recorder.backward and self._recorder.failed is not None:
            (path, _), line, _ = self._recorder.failed
        where = f"{path or 'model'} ({type(self._model.get_submodule(path)).__name__})"
        at = f"{' in its backward' if self._recorder.backward else ''}{f' at {line}' if line else ''}"
        must, got, do = "must run on tensors without values", said(error).rstrip("."), _RUN
        if isinstance(error, VALUES_NEEDED):
            name = name_of(error.func).strip("_")
            must = "must not let values decide what runs, for a trace has none"
            got = _LOOKS.get(name, f"`{name}`")
            do = _LOOK + (_EXPERTS if "expert" in path else "")
        elif isinstance(error, UnsupportedOperatorException):
            must, got = "must run operations that work without values", f"`{error.func}`"
            do = "Register a fake form of it."
        return ModelError(where, must, got=got + at, do=do)


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
    """Return the number that a backward begins at, and its description."""
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
