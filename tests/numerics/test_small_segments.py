"""Small segments of blocks that are gathered with the root: other messages, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.numerics.runs import Run, config, make, same, train
from tests.ranks.harness import run_ranks
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.plan import build, layout

FEW, SOME, MANY = 2, 512, 16384
"""Ranks: none, the pinned norms and all parameters of blocks are small."""
PINNED = {"rules": [{"match": "layers.*.norm*", "pin": "fp32"}]}

_move = build.move_small_segments


def as_on(ranks: int) -> None:
    """Of this process: what is small is what would be on so many, of a model that is as much larger."""
    layout.MIN_SLICED_ELEMENTS = 256 * 256 // 32

    def moved(units: Any, columns: Any, model: Any, slices: int) -> Any:
        return _move(units, columns, model, ranks // 32 if ranks > FEW else 1)

    build.move_small_segments = moved


def written(stage: int) -> dict[str, Any]:
    return config(stage, "bf16", 2, precision=PINNED)


def trained(ranks: int, stage: int) -> tuple[Run, int, int]:
    """A run, the rows of the root, and how many collectives a step took."""
    as_on(ranks)
    engine = make(written(stage))
    train(engine, 1, 2)
    with engine.comm.record() as calls:
        run = train(engine, 1, 2)
    rows = len(engine.plan.units[0].rows)
    engine.destroy()
    return run, rows, len(calls)


def differences(cases: list[tuple[int, int]]) -> list[str]:
    wrong = []
    for ranks, stage in cases:
        (apart, root, calls), (together, more, fewer) = (trained(n, stage) for n in (FEW, ranks))
        wrong += [f"stage {stage}: {what}" for what in same([apart, together])]
        if more - root not in (8, 22) or fewer >= calls:
            wrong.append(f"stage {stage}: {more - root} rows moved, {fewer} messages of {calls}")
    return wrong


def test_bits_are_the_same_where_small_segments_are_gathered_with_the_root() -> None:
    cases = [(SOME, 3), (MANY, 0)]
    assert run_ranks(differences, 2, cases) == [[]] * 2


def loaded_by_name(folder: Path) -> list[str]:
    as_on(FEW)
    engine = make(written(3))
    before = train(engine, 1, 2)
    Checkpoints(engine, folder, quiet=True).save()
    engine.destroy()
    as_on(SOME)
    engine = make(written(3))
    Checkpoints(engine, folder, quiet=True).load()
    after = train(engine, 0, 2)
    engine.destroy()
    after.losses, after.norms, after.scales = before.losses, before.norms, before.scales
    return same([before, after])


def test_a_checkpoint_of_one_layout_is_loaded_into_the_other(tmp_path: Path) -> None:
    assert run_ranks(loaded_by_name, 2, tmp_path) == [[]] * 2
