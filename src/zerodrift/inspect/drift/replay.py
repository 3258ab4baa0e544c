"""List the cells in which a sampler differs from a trainer, and run the trainer's model with some of them.

A cell is a tensor that is not what was trained, the rounded tensors of a role, parameters that compute in
another dtype, or an activation in another dtype. Each run is an engine with a copy of the model, and with the
sampler's values and dtypes in the given cells. Activations are rounded at calls of torch's functions inside
attention, and at the outputs of the modules that make rotary tables and logits. Their own dtypes are recorded
there too.

Invariant: values that are equal after the trainer's rounding are no cell. A run without cells is the
trainer's. A run with all cells has every tensor and every dtype of the sampler. Equal bits give equal runs.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, Problems, UnsupportedError, did_you_mean
from zerodrift.inspect.audit import LOSSES, Batch, Signals, Subject, forward_signals, make_rule, running
from zerodrift.inspect.drift.sampler import ACTIVATIONS, ROLES, Role, SamplerDtypes, SamplerTensor
from zerodrift.inspect.drift.tensor_status import TensorVerdict
from zerodrift.inspect.drift.trainer import TrainerSide
from zerodrift.inspect.trace import ModulePaths
from zerodrift.mesh import MeshShape
from zerodrift.model import ModelSpec
from zerodrift.plan import Plan, Row, build
from zerodrift.policy import PIN, PRODUCTS, Mode, Policy, glob
from zerodrift.weights import set_parameter


@dataclass(frozen=True, slots=True)
class DifferentCell:
    """One difference of the sampler from the trainer."""

    kind: Literal["tensor", "weights", "dtype", "compute", "buffers", "activation"]
    """`tensor`: not what was trained; `weights`: rounded; `dtype`: parameters in another compute dtype;
    `compute`: all parameters without a key of their own in another compute dtype."""
    key: str  # a tensor's name, or a key of the sampler's table
    told: str  # the difference in words: `rounded to bf16`, `bf16, here fp32`
    names: tuple[str, ...] = ()  # names of the tensors


def different_values(
    trainer: TrainerSide,
    trained: Mapping[str, Tensor],
    held: Mapping[str, SamplerTensor],
    verdicts: Mapping[str, TensorVerdict],
) -> list[DifferentCell]:
    """Return the cells of tensors whose values differ in the trainer's storage dtype."""
    cells: list[DifferentCell] = []
    rounded: dict[tuple[str, str], list[str]] = {}
    for name, verdict in verdicts.items():
        if verdict.kind == "missing":
            continue
        if not verdict.is_as_trained:
            cells.append(DifferentCell("tensor", name, f"{verdict.kind}, {verdict.told}", (name,)))
            continue
        row, mine, theirs = trainer.plan.row(name), trained[name], held[name].values
        if mine.is_floating_point():
            storage = (row.columns.storage.dtype if row is not None else DType.FP32).torch
            mine, theirs = mine.to(storage), theirs.to(storage)
        if not bool((mine == theirs).all()):
            role = str(trainer.roles[row.name]) if row is not None else "buffers"
            told = held[name].dtype if verdict.kind == "quantised" else verdict.told
            rounded.setdefault((role, told), []).append(name)
    for (role, told), names in rounded.items():
        cells.append(DifferentCell("weights", f"{role} weights", told, tuple(names)))
    return cells


def sampler_mode(table: SamplerDtypes, plan: Plan) -> Mode:
    return Mode(str(table.keys.get("compute", plan.policy.mode)))


def sampler_compute(table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role]) -> dict[str, DType]:
    """Return the sampler's compute dtypes of floating parameters that its table covers, by first name."""
    problems, has = Problems(), set(roles.values())
    for role in ROLES:
        if role in table.keys and role not in has:
            do = f"The model has {', '.join(sorted(has))}."
            if role == "embedding" and any(len(row.names) > 1 for row in plan.rows):
                do += " Its table of embeddings is tied: it is the `head`."
            problems.add(role, "must be of a parameter of the model", got="none of that role", do=do)
    names = [name for row in plan.rows for name in row.names]
    for pattern in table.tensors:
        if not any(map(glob(pattern), names)):
            hint = did_you_mean(pattern, names)
            problems.add(f"tensors.{pattern}", "must match a parameter", got="no match", do=hint)
    problems.raise_as(ConfigError, "sampler")
    found = {}
    for row in plan.rows:
        if row.columns.compute.is_floating:
            tensors = reversed(table.tensors.items())
            globs = (dtype for pattern, dtype in tensors if any(map(glob(pattern), row.names)))
            dtype = next(globs, table.keys.get(roles[row.name], table.keys.get("compute")))
            if dtype is not None:
                found[row.name] = dtype
    return found


def different_dtypes(
    table: SamplerDtypes, plan: Plan, roles: Mapping[str, Role], compute: Mapping[str, DType]
) -> list[DifferentCell]:
    """Return the cells of parameters that compute in another dtype. Under autocast the dtype depends on the
    operation, so that only fp32 can be asked for one parameter."""
    before, after = plan.policy.mode, sampler_mode(table, plan)
    if before.autocast:
        usual = DType.FP32 if after.autocast else after.dtype
        for name, dtype in compute.items():
            if dtype not in (DType.FP32, usual):
                must = "must be fp32, or have `compute`, if the trainer is under autocast"
                do = "Set `compute` to the sampler's dtype: it has no autocast."
                raise UnsupportedError(f"sampler.{roles[name]}", must, got=dtype, do=do)
    changed: list[str] = []
    groups: dict[tuple[str, str], list[str]] = {}
    for row in plan.rows:
        if row.name not in compute:
            continue
        dtype, mine, is_free = compute[row.name], row.columns.compute, not row.columns.pinned
        follows_mode = is_free and (before.autocast or mine is before.dtype)
        if before is not after and follows_mode and dtype is after.dtype:
            changed.append(row.name)
        elif dtype is not mine or (before.autocast and is_free):
            groups.setdefault((roles[row.name], f"{mine}, there {dtype}"), []).append(row.name)
    cells = [DifferentCell("dtype", key, told, tuple(names)) for (key, told), names in groups.items()]
    if before is not after:
        cells.insert(0, DifferentCell("compute", "compute", f"{before}, there {after}", tuple(changed)))
    return cells


Cells = Collection[DifferentCell]


@dataclass(slots=True)
class SideReplays:
    """Runs of a trainer's model. Each combination of cells runs once."""

    trainer: TrainerSide
    table: SamplerDtypes
    tensors: Mapping[str, SamplerTensor]  # the sampler's tensors
    compute: Mapping[str, DType]  # first name -> the sampler's compute dtype
    batches: Sequence[Batch]
    valued: Collection[str]  # tensors with a cell for their values; other values come with the dtype's cell
    done: dict[frozenset[DifferentCell], tuple[Signals, ActivationRounder]] = field(default_factory=dict)

    def run(self, cells: Cells) -> Signals:
        """Run with these cells of the sampler, and the trainer's everywhere else."""
        key = frozenset(cells)
        if key not in self.done:
            values: dict[str, Tensor] = {}
            for cell in cells:
                for name in cell.names:
                    with_dtype = cell.kind in ("dtype", "compute") and name not in self.valued
                    if cell.kind in ("tensor", "weights") or (with_dtype and name in self.tensors):
                        values[name] = self.tensors[name].values
            asked = {cell.key: self.table.keys[cell.key] for cell in cells if cell.kind == "activation"}
            self.done[key] = self._run(values, cells, asked)
        return self.done[key][0]

    def run_sampler(self, cells: Cells) -> Signals:
        """Run with all tensors of the sampler and its whole table, whether they differ or not."""
        values = {name: tensor.values for name, tensor in self.tensors.items()}
        asked = {key: dtype for key, dtype in self.table.keys.items() if key in ACTIVATIONS}
        return self._run(values, cells, asked)[0]

    def seen(self, cells: Cells) -> ActivationRounder:
        """Run with these cells, and return the recorder of the dtypes of its activations."""
        self.run(cells)
        return self.done[frozenset(cells)][1]

    def _run(
        self, values: Mapping[str, Tensor], cells: Cells, asked: Mapping[str, DType]
    ) -> tuple[Signals, ActivationRounder]:
        buffers = self.table.keys["buffers"] if any(cell.kind == "buffers" for cell in cells) else None

        def make() -> nn.Module:
            module = copy.deepcopy(self.trainer.module)
            _set_values(module, values, self.tensors, self.trainer.spec)
            for buffer in module.buffers() if buffers is not None else ():
                if buffers is not None and buffer.is_floating_point():
                    buffer.copy_(buffer.to(buffers.torch).to(buffer.dtype))
            return module

        rounder = ActivationRounder(asked)
        with (
            running(Subject(make), self._policy(cells), MeshShape()) as engine,
            rounder.hooks(engine.module, self.trainer.head),
        ):
            return forward_signals(engine, self.batches, rounder.around), rounder

    def _policy(self, cells: Cells) -> Policy:
        """Return the trainer's policy with rules that give parameters the dtypes of the cells."""
        plan = self.trainer.plan
        policy, mode = plan.policy, plan.policy.mode
        if any(cell.kind == "compute" for cell in cells):
            # Demands on the forward of every parameter belong to the trainer's mode.
            mode = sampler_mode(self.table, plan)
            forward = ("storage", "gather", "compute")
            demands = tuple(demand for demand in policy.demands if demand[0] not in forward)
            policy = replace(policy, mode=mode, demands=demands, safe=policy.safe if mode.autocast else ())
        theirs = {name for cell in cells if cell.kind in ("compute", "dtype") for name in cell.names}
        rules = []
        for row, now in zip(plan.rows, build(policy, self.trainer.spec, MeshShape()).rows, strict=True):
            if not row.columns.compute.is_floating:
                continue
            sets = _forward_columns(row)
            if row.name in theirs:
                sets = dict.fromkeys(sets, str(self.compute[row.name]))
            unpinned = row.name in theirs and now.columns.pinned and sets["compute"] != "fp32"
            if sets != _forward_columns(now) or unpinned:
                pin = sets["compute"] == "fp32" and mode.autocast
                cause = "the other side"
                rules += [make_rule(n, dict(PIN) if pin else sets, pin=pin, why=cause) for n in row.names]
        return replace(policy, rules=(*policy.rules, *rules))


def _forward_columns(row: Row) -> dict[str, str]:
    columns = row.columns
    dtypes = {"storage": columns.storage.dtype, "gather": columns.gather, "compute": columns.compute}
    if (products := columns.products) is not None:
        dtypes |= {f"compute.{part}": getattr(products, part) for part in PRODUCTS}
    return {column: str(dtype) for column, dtype in dtypes.items()}


def _set_values(
    module: nn.Module, values: Mapping[str, Tensor], held: Collection[str], spec: ModelSpec
) -> None:
    """Set the sampler's values. A tied parameter stays tied, except for names that the sampler holds too."""
    tied = {name: parameter.names for parameter in spec.parameters for name in parameter.names}
    buffers = dict(module.named_buffers())
    for name, value in values.items():
        if name in buffers:
            buffers[name].copy_(value)
            continue
        parameter = nn.Parameter(value.clone(), requires_grad=False)
        for other in tied[name]:
            if other == name or other not in held:
                set_parameter(module, other, parameter)


_ATTENTION = re.compile(r"(.*\.)?[^.]*(attn|attention)[^.]*(\..*)?", re.IGNORECASE)
_ROTARY = re.compile(r"[Rr]otary|R[Oo][Pp][Ee]")
_PRODUCTS = frozenset(("matmul", "__matmul__", "bmm"))
_SOFTMAX = frozenset(("softmax", "_softmax"))


class ActivationRounder(TorchFunctionMode):
    """Rounds activations of a forward, and records the dtypes of each kind of activation in `seen`."""

    def __init__(self, asked: Mapping[str, DType]) -> None:
        super().__init__()
        self.asked = {key: dtype.torch for key, dtype in asked.items()}
        self.seen: dict[str, set[torch.dtype]] = {}
        self._path: ModulePaths | None = None

    def see(self, key: str, dtype: torch.dtype) -> torch.dtype | None:
        """Record a dtype, and return the dtype that replaces it."""
        self.seen.setdefault(key, set()).add(dtype)
        return self.asked.get(key)

    def rounded(self, key: str, tensor: Tensor) -> Tensor:
        dtype = self.see(key, tensor.dtype)
        return tensor if dtype is None else tensor.to(dtype).to(tensor.dtype)

    def around(self, path: ModulePaths) -> ActivationRounder:
        """Return a context that changes the calls of a forward."""
        self._path = path
        return self

    @contextlib.contextmanager
    def hooks(self, model: nn.Module, head: str) -> Iterator[None]:
        """Round the outputs of the modules that make logits and rotary tables."""
        handles = []
        for path, module in model.named_modules():
            rotary = "rotary" if _ROTARY.search(type(module).__name__) else ""
            if key := "logits" if head and path == head else rotary:
                handles.append(module.register_forward_hook(functools.partial(self._returned, key)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _returned(self, key: str, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self._returned(key, module, args, item) for item in output)
        floating = isinstance(output, Tensor) and output.is_floating_point()
        return self.rounded(key, output) if floating else output

    def _is_in_attention(self) -> bool:
        return self._path is not None and _ATTENTION.fullmatch(self._path.current) is not None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            given |= {key: self.rounded("kv", given[key]) for key in ("key", "value")}
            dtype = self.see("softmax", torch.float32)  # kernels use fp32 for any inputs
            return func(**given) if dtype is None or dtype is torch.float32 else _attention(dtype, given)
        if name in LOSSES:
            logits = args[0] if args else kwargs["input"]
            dtype = self.see("logprobs", logits.dtype)
            if dtype is None or name != "cross_entropy":
                return func(*args, **kwargs)
            rest = {key: value for key, value in kwargs.items() if key != "input"}
            return func(logits.to(dtype), *args[1:], **rest)
        if (name in _SOFTMAX or name in _PRODUCTS) and self._is_in_attention():
            if name in _SOFTMAX:
                inside = kwargs.get("dtype") or args[0].dtype
                dtype = self.see("softmax", inside)
                if dtype is None:
                    return func(*args, **kwargs)
                kwargs = {key: value for key, value in kwargs.items() if key != "dtype"}
                return func(args[0].to(dtype), *args[1:], **kwargs).to(inside)
            if len(args) >= 2 and all(map(_is_activation, args[:2])):
                # In products with keys and with values, the cache is on the right.
                return func(args[0], self.rounded("kv", args[1]), *args[2:], **kwargs)
        return func(*args, **kwargs)


def _is_activation(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() >= 3 and not isinstance(value, nn.Parameter)


def _attention(dtype: torch.dtype, given: dict[str, Any]) -> Tensor:
    query, key, value, scale = given["query"], given["key"], given["value"], given.get("scale")
    if given.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    scores = (query @ key.transpose(-1, -2)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = given.get("attn_mask")
    if given.get("is_causal"):
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None and mask.dtype is torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return scores.to(dtype).softmax(-1).to(query.dtype) @ value
