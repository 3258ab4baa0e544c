"""Stacks of experts over the expert axis: what must hold of them, and what one rank has.

A stack is a parameter whose first dimension counts experts. Its rank's part is the experts from
`rank * count / ranks` on, one run of elements of the row-major flattening, so whoever reads a file or writes
one needs an offset and nothing else.

Invariant: pure. Every part has the same shape, so the plan is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerodrift.errors import ConfigError, Problems
from zerodrift.model.spec import ModelSpec, ParameterSpec
from zerodrift.policy.nouns import Columns


def own_experts(parameter: ParameterSpec, parts: int) -> ParameterSpec:
    """What one of `parts` ranks has of a stack."""
    if parts == 1:
        return parameter
    return replace(parameter, shape=(parameter.shape[0] // parts, *parameter.shape[1:]))


def require_experts(model: ModelSpec, columns: Sequence[Columns], ranks: int) -> None:
    """Raise one error with everything that cannot be divided over `ranks`."""
    if ranks == 1:
        return
    problems = Problems()
    stacks = [p for p, of in zip(model.parameters, columns, strict=True) if of.parallel]
    counts: dict[str, tuple[int, str]] = {}
    for parameter in stacks:
        _require_stack(parameter, ranks, counts, problems)
    for parameter, of in zip(model.parameters, columns, strict=True):
        # Whole beside stacks that are divided, it would be read by a rank's own numbers of experts.
        count, first = counts.get(parameter.name.rpartition(".")[0], (0, ""))
        if count and not of.parallel and parameter.shape[:1] == (count,):
            must = f"must be named in `experts.parameters`: it has the {count} experts of `{first}` beside it"
            problems.add(parameter.name, must, got="no match", do="Name all stacks of a module, or none.")
    if not stacks:
        problems.add(
            "experts.parameters",
            f"must match a parameter of {model.source}",
            got="no match",
            do="Name the parameters that stack experts in their first dimension, or leave `experts` out.",
        )
    problems.raise_as(ConfigError)


def _require_stack(
    parameter: ParameterSpec, ranks: int, counts: dict[str, tuple[int, str]], problems: Problems
) -> None:
    """`counts` has, by module, how many experts its first stack has, and the name of that."""
    name, shape = parameter.name, list(parameter.shape)
    owner = name.rpartition(".")[0]
    if len(parameter.names) > 1:
        problems.add(
            name, "must not be tied, as a stack of experts", got=", ".join(parameter.names), do=_LESS
        )
        return
    if owner.rpartition(".")[2].isdecimal() or any(part.isdecimal() for part in _after(owner, "experts")):
        problems.add(
            name,
            "must stack all experts of its layer in one parameter, `[experts, ...]`",
            got="one expert of a list of modules",
            do="Stack them, as the models of transformers 5 do, or leave `experts` out.",
        )
        return
    if not shape or shape[0] == 0 or shape[0] % ranks:
        problems.add(
            name,
            f"must have a first dimension of experts that {ranks} ranks divide evenly",
            got=f"shape {shape}",
            do=f"Change `experts.ranks`, or {_LESS[0].lower()}{_LESS[1:]}",
        )
        return
    count, first = counts.setdefault(owner, (shape[0], name))
    if count != shape[0]:
        problems.add(
            name, f"must have the {count} experts of `{first}` beside it", got=f"shape {shape}", do=_LESS
        )


_LESS = "Name only stacks of experts in `experts.parameters`."


def _after(path: str, word: str) -> list[str]:
    """The components of a module path behind one of a name; none where there is no such."""
    parts = path.split(".")
    return parts[parts.index(word) + 1 :] if word in parts else []
