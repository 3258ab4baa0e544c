"""The columns of every parameter of a model under one policy.

Rules are matched by name. Columns are completed once per distinct input and equal results are one object, so
46,000 parameters cost a few dozen completions.

Muon updates hidden matrices by default, since it makes every direction of an update equally long: rows of an
embedding, a head or a router see few gradients. The rule is DeepSpeed's (two dimensions or more, and no name
with `embed` or `lm_head`) with a few more cases; every row of a plan says which case applied.

Invariant: the result depends on the policy, the parameter and its checkpoint dtype alone.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from zerodrift import dtypes
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.model import ModelSpec, ParameterSpec
from zerodrift.optimizers import of_type
from zerodrift.policy import rules
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.columns import ColumnContext, ParameterTraits, complete
from zerodrift.policy.decisions import Columns, ComponentSpec, Policy

MUON_RULE = (
    "hidden matrices, stacked ones one by one; not embeddings, heads, routers, norms, biases, convolutions"
)
"""The default rule of Muon in a clause, for reports."""

HEADS = ("lm_head", "head", "embed_out", "classifier", "score")
"""Last components of the module path of an output head."""

ROUTERS = ("router", "gate")
"""Name components of a router. `gate_proj` is not a router."""

_CONVOLUTION = re.compile(r"(Lazy)?Conv(Transpose)?[123]d")
"""Classes of torch's convolutions. `Conv1D`, which GPT-2 has, is a linear layer."""


_COMPUTED_WITH = re.compile(
    r"(?P<path>.*?)(\.parametrizations\.\w+\.\d+\._[uv]|\.running_(mean|var)|\.\w+_[uv])"
)
"""Names of buffers that torch computes with parameters: running statistics and vectors of spectral norms."""


class ColumnsOf:
    """A cache of columns: `columns_of(parameter)` returns one object for equal inputs."""

    def __init__(self, policy: Policy, model: ModelSpec) -> None:
        self._policy = policy
        self._base: rules.Demands = {column: (value, why) for column, value, why in policy.demands}
        self._checkpoint = dict(model.checkpoint)
        self._checkpoint_below = _dtypes_below(self._checkpoint)
        self._context = ColumnContext(
            policy.mode,
            BACKENDS[policy.backend],
            policy.sharding.stage,
            policy.allow_narrow,
            _beta2(policy.optimizer),
            policy.optimizer is not None and of_type(policy.optimizer.type).matrices,
            policy.requires_tree,
        )
        self._known: dict[Any, Columns] = {}
        matches = ((_COMPUTED_WITH.fullmatch(buffer.name), buffer.dtype) for buffer in model.buffers)
        self._statistics = {found["path"]: dtype for found, dtype in matches if found and dtype.is_floating}
        """Path of a module -> dtype of its statistics."""
        self._refused: set[str] = set()
        self.problems = Problems()

    def __call__(self, parameter: ParameterSpec) -> Columns:
        demands, matched = rules.demands(self._base, self._policy.rules, parameter)
        output = next((rule.output for rule in reversed(matched) if rule.output is not None), None)
        # A later rule may have changed a column of a pin.
        pinned = any(rule.pin for rule in matched) and all(
            demands.get(column, ("", ""))[0] == value for column, value in rules.PIN if column != "export"
        )
        if parameter.trained and not parameter.dtype.is_floating:
            must = "must be of real floating numbers to be trained"
            do = "Hold a complex one as `torch.view_as_real` of it, or freeze it before `initialize`."
            self.problems.add(parameter.name, must, got=parameter.dtype, do=do)
        safe, stacks = self._policy.safe, self._policy.experts
        stack = next((glob for glob in stacks if any(map(rules.glob(glob), parameter.names))), "")
        traits = ParameterTraits(
            parameter.dtype,
            parameter.trained,
            bool(safe) and all(_in_safe_list(owner.klass, safe) for owner in parameter.owners),
            self._checkpoint_dtype(parameter),
            len(parameter.shape),
            not_hidden(parameter) if self._context.muon else "",
            f"experts: '{stack}'" if stack else "",
        )
        key = (tuple(demands.items()), output, pinned, traits)
        columns = self._known.get(key)
        if columns is None:
            columns = complete(demands, self._context, traits, pinned, output, self.problems)
            self._known[key] = columns
        self._require_as_wide_as_buffers(parameter, columns)
        return columns

    def _require_as_wide_as_buffers(self, parameter: ParameterSpec, columns: Columns) -> None:
        """Refuse parameters that compute in a narrower dtype than their module's statistics.

        Running statistics and the vectors of a spectral norm keep their dtype, and torch computes them with
        the parameters in one dtype.
        """
        for owner in parameter.owners:
            path = owner.path.partition(".parametrizations.")[0]
            held = self._statistics.get(path)
            if path in self._refused or held is None or not columns.compute.is_floating:
                continue
            if held.size > columns.compute.size:
                self._refused.add(path)
                must = f"must compute in the dtype of its buffers, {held}: torch mixes no dtypes in it"
                do = f"Write the rule `{{match: '{path}.*', pin: fp32, output: input}}`."
                self.problems.add(path, must, got=columns.compute, do=do)

    def _checkpoint_dtype(self, parameter: ParameterSpec) -> DType | None:
        for name in parameter.names:
            if name in self._checkpoint:
                return self._checkpoint[name]
        paths = [owner.path for owner in parameter.owners]
        below = {dtype for path in paths for dtype in self._checkpoint_below.get(path, ())}
        return dtypes.widest(tuple(below)) if below else None


def _dtypes_below(checkpoint: Mapping[str, DType]) -> dict[str, set[DType]]:
    """Map module paths to the dtypes of the tensors below them.

    A model may merge tensors of a file: `experts.gate_up_proj` for `experts.0.gate_proj.weight` and the rest.
    """
    below: dict[str, set[DType]] = {}
    for path, dtype in checkpoint.items():
        while "." in path:
            path = path.rpartition(".")[0]
            below.setdefault(path, set()).add(dtype)
    return below


@functools.lru_cache(maxsize=4096)
def _in_safe_list(klass: str, safe: tuple[str, ...]) -> bool:
    return any(rules.is_class(klass, wanted) for wanted in safe)


def _beta2(optimizer: ComponentSpec | None) -> float | None:
    """Return the decay of the optimizer's second moment, or None without one; Muon's AdamW has one."""
    if optimizer is None:
        return None
    algorithm = of_type(optimizer.type).rest or of_type(optimizer.type)
    if not algorithm.beta2:
        return None
    betas = json.loads(optimizer.params).get("betas", algorithm.defaults["betas"])
    try:
        return float(betas[1])
    except (TypeError, ValueError, IndexError):
        return None


def not_hidden(parameter: ParameterSpec) -> str:
    """Return why a parameter is no hidden matrix by any of its names, or `""` for a hidden matrix."""
    if len(parameter.shape) < 2:
        return "a vector, no matrix" if parameter.shape else "a single number"
    for name, owner in zip(parameter.names, parameter.owners, strict=True):
        role = _role(name, owner.klass.rpartition(".")[2])
        if role:
            return role
    return ""


def _role(name: str, klass: str) -> str:
    """Return the role of a parameter by its name and its module's class; `""` for none of the listed roles.

    The name counts too, because gpt-oss stacks the biases of its experts into two dimensions.
    """
    parts = name.lower().split(".")
    module = parts[-2] if len(parts) > 1 else ""
    roles = {
        "an embedding": klass.startswith("Embedding") or "embed" in name.lower() or module in ("wte", "wpe"),
        "an output head": module in HEADS,
        "a router": any(part in ROUTERS for part in parts),
        "a bias": parts[-1].endswith("bias"),
        "a norm": "norm" in module,
        "a convolution": _CONVOLUTION.fullmatch(klass) is not None,
    }
    return next((role for role, fits in roles.items() if fits), "")
