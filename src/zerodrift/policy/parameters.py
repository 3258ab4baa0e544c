"""The columns of every parameter of a model under one policy.

Rules are matched per name, columns are completed once per distinct question, and equal answers are one
object, so 46,000 parameters cost a few dozen completions.

Invariant: the answer depends on the policy, the parameter and its checkpoint dtype, and on nothing else.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Any

from zerodrift import dtypes
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.model.spec import ModelSpec, ParameterSpec
from zerodrift.optimizers import of_type
from zerodrift.policy import matrices, rules
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.columns import ColumnContext, ParameterTraits, complete
from zerodrift.policy.nouns import Columns, ComponentSpec, Policy, ResolvedRule


class ColumnsOf:
    """Answers `columns(parameter)` for one policy; equal questions get the same object back."""

    def __init__(self, policy: Policy, model: ModelSpec) -> None:
        self._rules = policy.rules
        self._base: rules.Demands = {column: (value, why) for column, value, why in policy.demands}
        self._safe = policy.safe
        self._experts = policy.experts
        self._checkpoint = _Checkpoint(model.checkpoint)
        self._setting = ColumnContext(
            policy.mode,
            BACKENDS[policy.backend],
            policy.sharding.stage,
            policy.allow_narrow,
            _beta2(policy.optimizer),
            policy.optimizer is not None and of_type(policy.optimizer.type).matrices,
        )
        self._known: dict[Any, Columns] = {}
        self._beside = _buffer_dtypes(model)
        self._told: set[str] = set()
        self.problems = Problems()

    def __call__(self, parameter: ParameterSpec) -> Columns:
        asked, matched = rules.demands(self._base, self._rules, parameter)
        output = next((rule.output for rule in reversed(matched) if rule.output is not None), None)
        pinned = _is_pinned(asked, matched)
        if parameter.trained and not parameter.dtype.is_floating:
            self.problems.add(
                parameter.name,
                "must be of real floating numbers to be trained",
                got=str(parameter.dtype),
                do="Hold a complex one as `torch.view_as_real` of it, or freeze it before `initialize`.",
            )
        subject = ParameterTraits(
            parameter.dtype,
            parameter.trained,
            self._is_safe(parameter),
            self._checkpoint.dtype(parameter),
            len(parameter.shape),
            matrices.not_hidden(parameter) if self._setting.muon else "",
            self._expert(parameter),
        )
        key = (tuple(asked.items()), output, pinned, subject)
        columns = self._known.get(key)
        if columns is None:
            columns = complete(asked, self._setting, subject, pinned, output, self.problems)
            self._known[key] = columns
        self._require_as_wide_as_buffers(parameter, columns)
        return columns

    def _require_as_wide_as_buffers(self, parameter: ParameterSpec, columns: Columns) -> None:
        """Running statistics and the vectors of a spectral norm stay what they are, and torch computes them
        with their module's parameters in one dtype."""
        for owner in parameter.owners:
            path = owner.path.partition(".parametrizations.")[0]
            held = self._beside.get(path)
            if path in self._told or held is None or not columns.compute.is_floating:
                continue
            if held.size > columns.compute.size:
                self._told.add(path)
                self.problems.add(
                    path,
                    f"must compute in the dtype of its buffers, {held}: torch mixes no dtypes in it",
                    got=str(columns.compute),
                    do=f"Write the rule `{{match: '{path}.*', pin: fp32, output: input}}`.",
                )

    def _expert(self, parameter: ParameterSpec) -> str:
        """The pattern that says that the parameter is a stack of experts."""
        patterns = (p for p in self._experts if any(rules.glob(p)(name) for name in parameter.names))
        return f"experts: '{pattern}'" if (pattern := next(patterns, "")) else ""

    def _is_safe(self, parameter: ParameterSpec) -> bool:
        """Low precision only if every module that owns the parameter is in the safe list."""
        return bool(self._safe) and all(_in_safe_list(owner.klass, self._safe) for owner in parameter.owners)


_COMPUTED_WITH = re.compile(
    r"(?P<path>.*?)(\.parametrizations\.\w+\.\d+\._[uv]|\.running_(mean|var)|\.\w+_[uv])"
)
"""Buffers that torch computes with parameters: those of norms with statistics and of spectral norms."""


def _buffer_dtypes(model: ModelSpec) -> dict[str, DType]:
    """Module path -> the dtype of such buffers of it."""
    matches = ((_COMPUTED_WITH.fullmatch(buffer.name), buffer.dtype) for buffer in model.buffers)
    return {match["path"]: dtype for match, dtype in matches if match is not None and dtype.is_floating}


class _Checkpoint:
    """The dtype of a parameter in the checkpoint that the weights come from."""

    def __init__(self, tensors: tuple[tuple[str, DType], ...]) -> None:
        self._tensors = dict(tensors)

    def dtype(self, parameter: ParameterSpec) -> DType | None:
        for name in parameter.names:
            if name in self._tensors:
                return self._tensors[name]
        below = {dtype for owner in parameter.owners for dtype in self._below.get(owner.path, ())}
        return dtypes.widest(tuple(below)) if below else None

    @functools.cached_property
    def _below(self) -> dict[str, set[DType]]:
        """Module path -> dtypes of the tensors below it: a model may hold merged what a file holds apart
        (`experts.gate_up_proj` for `experts.0.gate_proj.weight` and the rest)."""
        below: dict[str, set[DType]] = {}
        for name, dtype in self._tensors.items():
            path = name
            while "." in path:
                path = path.rpartition(".")[0]
                below.setdefault(path, set()).add(dtype)
        return below


@functools.lru_cache(maxsize=4096)
def _in_safe_list(klass: str, safe: tuple[str, ...]) -> bool:
    return any(rules.is_class(klass, wanted) for wanted in safe)


def _is_pinned(asked: rules.Demands, matched: tuple[ResolvedRule, ...]) -> bool:
    """A pin holds as long as no later rule narrowed one of its columns."""
    return any(rule.pin for rule in matched) and all(
        asked.get(column, ("", ""))[0] == value for column, value in rules.PIN if column != "export"
    )


def _beta2(optimizer: ComponentSpec | None) -> float | None:
    """The second moment's decay, if the config names an optimizer that has one; Muon's AdamW does."""
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
