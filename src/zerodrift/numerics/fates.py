"""Every tensor on its way from the trainer to the sampler: as trained, as sent, as loaded.

Invariant: each tensor of the model that a folder holds has one verdict, of what the sampler has; where there
are two folders, the step at which it became that is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zerodrift.numerics.sent import SentTensor, read_sent
from zerodrift.numerics.tensors import TensorVerdict, digest, judged
from zerodrift.numerics.trainer import Trainer
from zerodrift.weights.matching import expected_tensors


@dataclass(frozen=True, slots=True)
class TensorFate:
    """One tensor on its way from the trainer to the sampler."""

    name: str
    verdict: TensorVerdict
    step: str
    """Between which places it became what it is: `sent` or `loaded`."""
    dtype: str
    digests: tuple[tuple[str, str], ...]
    """(`trained`, `sent`, `loaded`; hex digest). That of what was trained is of its values rounded to the
    dtype that was sent."""


def trained_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Under every name; fp32 where they are floating."""
    named = (
        *trainer.module.named_parameters(remove_duplicate=False),
        *trainer.module.named_buffers(remove_duplicate=False),
    )
    return {n: t.detach().float() if t.is_floating_point() else t.detach() for n, t in named}


def fates_of(
    trainer: Trainer, sent: Path | None, loaded: Path | None
) -> tuple[list[TensorFate], dict[str, SentTensor], tuple[tuple[str, int], ...], list[str]]:
    """Every tensor that was read, what the sampler has, how many are what, and what was not read."""
    places = [("sent", sent), ("loaded", loaded)]
    want = expected_tensors(trainer.spec.parameters, trainer.spec.buffers, trainer.module)
    read = [(step, read_sent(path.expanduser(), trainer.module, want)) for step, path in places if path]
    if not read:
        return [], {}, (), []
    trained, notes = trained_tensors(trainer), []
    fates: list[TensorFate] = []
    last = {name: tensor for name, tensor in read[-1][1].tensors.items()}
    names = {name: parameter.names for parameter in trainer.spec.parameters for name in parameter.names}
    for alias in [name for name in last if names.get(name, (name,))[0] != name]:
        first = last.get(names[alias][0])
        if first is not None and torch.equal(first.values, last[alias].values):
            del last[alias]
    for name, tensor in last.items():
        verdict = _judged(name, trained, last, names)
        step, digests = read[-1][0], [("trained", digest(trained[name].to(tensor.values.dtype)))]
        for before, side in read:
            held = side.tensors.get(name)
            if held is None:
                continue
            digests.append((before, digest(held.values)))
        if len(read) == 2 and not verdict.is_precision and name in read[0][1].tensors:
            at_first = judged(trained[name], read[0][1].tensors[name].values)
            step = "sent" if not at_first.is_precision else "loaded"
        fates.append(TensorFate(name, verdict, step, tensor.dtype, tuple(digests)))
    for step, side in read:
        gone = TensorVerdict("missing", f"not among what was {step}", 0, float("nan"))
        known = {fate.name for fate in fates}
        fates += [TensorFate(name, gone, step, "-", ()) for name in side.missing if name not in known]
        if side.unread:
            notes.append(f"{side.path}: {_some(side.unread)} not read: the model has no place for it.")
    counts: dict[str, int] = {}
    for fate in fates:
        kind = fate.verdict.told if fate.verdict.kind in ("same", "rounded") else fate.verdict.kind
        kind = fate.dtype if fate.verdict.kind == "quantised" else kind
        counts[kind] = counts.get(kind, 0) + 1
    return fates, last, tuple(sorted(counts.items(), key=lambda pair: -pair[1])), notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if len(names) > 3 else "")


def _judged(
    name: str,
    trained: Mapping[str, Tensor],
    held: Mapping[str, SentTensor],
    names: Mapping[str, tuple[str, ...]],
) -> TensorVerdict:
    tensor, mine = held[name], trained[name]
    tied = names.get(name, (name,))
    others = {
        other: values for other, values in trained.items() if other not in tied and values.shape == mine.shape
    }
    verdict = judged(mine, tensor.values, others, tensor.half_step)
    first = next((other for other in tied if other != name and other in held), "")
    if first and not verdict.is_precision:
        told = f"no longer one with `{first}`, which the model ties it to; {verdict.told}"
        return TensorVerdict("untied", told, verdict.differ, verdict.distance)
    return verdict
