"""What of a run that was watched is not as it should be between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median

from zerodrift.observer.advice import AVERAGES, library_of
from zerodrift.observer.finding import RunFinding, names_of
from zerodrift.observer.ranks import same_model
from zerodrift.observer.seen import COLUMNS, SeenModel, SeenProcess


def not_averaged(processes: Sequence[SeenProcess], model: SeenModel, library: str) -> Iterator[RunFinding]:
    """A rank's optimizer was given its own gradient, where ranks had different ones."""
    if len(processes) < 2:
        return
    made = {p.name: _made_of(p.name, model, processes) for p in model.parameters}
    alone, summed, lost = (
        [p for p in model.parameters if made[p.name] == what] for what in ("own", "sum", "neither")
    )
    if alone:
        yield RunFinding(
            "not-averaged",
            "reduce",
            names_of(alone),
            "What the optimizer was given is the gradient of its own rank, not the average: each rank trains "
            "on its part of the batch.",
            AVERAGES.get(library, AVERAGES[""]),
        )
    if summed:
        yield RunFinding(
            "not-averaged",
            "reduce",
            names_of(summed),
            f"What the optimizer was given is the sum of the gradients of {len(processes)} ranks, not their "
            f"mean: steps are {len(processes)} times as long, or clipped as often.",
            "Divide by the number of ranks, unless the loss was divided by it.",
        )
    if library == "deepspeed" and processes[0].micro_batches > 1 and 2 * len(lost) > len(made):
        yield RunFinding(
            "not-accumulated",
            "accumulate",
            names_of(lost),
            f"What the optimizer was given is no sum of the gradients of {processes[0].micro_batches} "
            "micro-batches: some were dropped.",
            "Set `gradient_accumulation_steps` to the micro-batches of a step and call `engine.step()` after "
            "each, or mark the last with `engine.set_gradient_accumulation_boundary`.",
        )


def _made_of(name: str, model: SeenModel, processes: Sequence[SeenProcess]) -> str:
    """What sampled elements that optimizers were given are a multiple of: a rank's `own` gradient, the `mean`
    or the `sum` over ranks, or `neither`; empty where they do not say."""
    alike = [same_model(process, model, processes[0]) for process in processes]
    parameters = [one.parameter(name) if one is not None else None for one in alike]
    owns = [p.facts.get("own") for p in parameters if p is not None and p.facts.get("own")]
    if len(owns) < len(processes):
        return ""
    by_own, by_mean = [], []
    for rank, parameter in enumerate(parameters):
        assert parameter is not None
        for place, value in enumerate(parameter.facts["used"]):
            elements = [own[place] for own in owns if own is not None]
            mean, own = sum(elements) / len(elements), elements[rank]
            if value and own and mean:
                by_own.append(value / own)
                by_mean.append(value / mean)
    if len(by_own) < _LEAST:
        return ""
    if _spread(by_mean, max) < _ALIKE:
        return "sum" if abs(median(by_mean) / len(processes) - 1) < _ALIKE else "mean"
    if _spread(by_mean, max) > 5 * _ALIKE and _spread(by_own, max) < _ALIKE:
        return "own"
    return "neither" if min(_spread(by_mean, median), _spread(by_own, median)) > _UNLIKE else ""


_LEAST = 3
"""Elements that say something."""

_ALIKE = 0.02
"""Relative spread that rounding explains."""

_UNLIKE = 0.2
"""Relative spread of half of the elements that rounding does not explain."""


def _spread(ratios: Sequence[float], of: Callable[[Iterable[float]], float]) -> float:
    """The greatest or the usual distance from the middle one, relative to it."""
    middle = median(ratios)
    return of(abs(ratio - middle) for ratio in ratios) / abs(middle) if middle else float("inf")


def ranks_differ(processes: Sequence[SeenProcess], model: SeenModel) -> Iterator[RunFinding]:
    for other in processes[1:]:
        same = same_model(other, model, processes[0])
        if same is None:
            continue
        library = library_of(model)
        for column in COLUMNS:
            if library == "deepspeed" and column == "accumulate":
                continue  # each rank reduces what it updates into another tensor
            unlike = [
                p
                for p in model.parameters
                if (q := same.parameter(p.name)) is not None
                and p.whats(column)
                and q.whats(column)
                and set(p.whats(column)) != set(q.whats(column))
            ]
            if unlike:
                q = same.parameter(unlike[0].name)
                yield RunFinding(
                    "ranks-differ",
                    column,
                    names_of(unlike),
                    f"Rank {processes[0].rank} has {', '.join(unlike[0].whats(column))}, rank {other.rank} "
                    f"{', '.join(q.whats(column)) if q is not None else '-'}.",
                    "Build the model and its optimizer alike on every rank.",
                )
        apart = [
            p
            for p in model.parameters
            if (q := same.parameter(p.name)) is not None
            and p.facts.get("optimized")
            and p.facts.get("digest") is not None
            and q.facts.get("digest") is not None
            and p.facts["digest"] != q.facts["digest"]
        ]
        if apart:
            yield RunFinding(
                "ranks-differ",
                "storage",
                names_of(apart),
                f"Values on rank {processes[0].rank} and rank {other.rank} differ, and each has all of it: "
                "they train apart.",
                "Begin with the same values on every rank (a seed before the model is built, or a "
                "broadcast), and average gradients.",
            )
            return
