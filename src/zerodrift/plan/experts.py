"""Stacks of experts over the expert axis: their requirements, and the part of one rank.

A stack is a parameter whose first dimension counts experts. A rank holds the experts from `rank * count /
ranks` on. They are one run of elements of the row-major flattening, so readers and writers of files need an
offset only.

Invariant: pure. Every part has the same shape, so the plan is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerodrift.errors import ConfigError, Problems
from zerodrift.model.spec import ModelSpec, ParameterSpec
from zerodrift.policy.nouns import Columns


def own_experts(parameter: ParameterSpec, parts: int) -> ParameterSpec:
    """Return the part of a stack on one of `parts` ranks."""
    if parts == 1:
        return parameter
    return replace(parameter, shape=(parameter.shape[0] // parts, *parameter.shape[1:]))


def require_experts(model: ModelSpec, columns: Sequence[Columns], ranks: int) -> None:
    """Raise one error with all parameters that cannot be divided over `ranks`."""
    if ranks == 1:
        return
    problems = Problems()
    stacks = [p for p, of in zip(model.parameters, columns, strict=True) if of.parallel]
    first_of: dict[str, tuple[int, str]] = {}  # module -> number of experts and name of its first stack
    for parameter in stacks:
        name, shape = parameter.name, list(parameter.shape)
        owner = name.rpartition(".")[0]
        parts = owner.split(".")
        after = parts[parts.index("experts") :] if "experts" in parts else parts[-1:]
        must, got, do = "", f"shape {shape}", _LESS
        if len(parameter.names) > 1:
            must, got = "must not be tied, as a stack of experts", ", ".join(parameter.names)
        elif any(part.isdecimal() for part in after):
            must = "must stack all experts of its layer in one parameter, `[experts, ...]`"
            got = "one expert of a list of modules"
            do = "Stack them, as the models of transformers 5 do, or leave `experts` out."
        elif not shape or shape[0] == 0 or shape[0] % ranks:
            must = f"must have a first dimension of experts that {ranks} ranks divide evenly"
            do = f"Change `experts.ranks`, or {_LESS[0].lower()}{_LESS[1:]}"
        else:
            count, first = first_of.setdefault(owner, (shape[0], name))
            if count != shape[0]:
                must = f"must have the {count} experts of `{first}` beside it"
        if must:
            problems.add(name, must, got=got, do=do)
    for parameter, of in zip(model.parameters, columns, strict=True):
        # A whole parameter beside divided stacks would be indexed by a rank's own expert numbers.
        count, first = first_of.get(parameter.name.rpartition(".")[0], (0, ""))
        if count and not of.parallel and parameter.shape[:1] == (count,):
            must = f"must be named in `experts.parameters`: it has the {count} experts of `{first}` beside it"
            problems.add(parameter.name, must, got="no match", do="Name all stacks of a module, or none.")
    if not stacks:
        do = "Name the parameters that stack experts in their first dimension, or leave `experts` out."
        problems.add("experts.parameters", f"must match a parameter of {model.source}", got="no match", do=do)
    problems.raise_as(ConfigError)


_LESS = "Name only stacks of experts in `experts.parameters`."
