"""`data.group_by_length`: the blocks of a step, the lengths of its micro-batches, and resuming."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.jobs import job, losses, on_a_rank
from tests.ranks.harness import run_ranks
from tests.unit.data_files import layout
from zerodrift.errors import ZerodriftError
from zerodrift.train.data.blocks import open_blocks
from zerodrift.train.data.sampling import WINDOW, BlockSampler, Feed, GroupedSampler, lengths_of, window
from zerodrift.train.loop.start import train


@pytest.mark.parametrize(("count", "samples"), [(1003, 7), (97, 8), (5, 8), (64, 64)])
def test_an_epoch_has_every_block_once(count: int, samples: int) -> None:
    order = BlockSampler(count, 3)
    lengths = np.random.default_rng(0).integers(2, 65, count)
    grouped, again = (GroupedSampler(order, lengths, 3) for _ in range(2))
    steps = 2 * count // samples + 2
    windows = {number: window(number, samples, count) for number in range(steps)}
    for number, (first, size) in windows.items():
        assert first <= number < first + size and 1 <= size <= WINDOW
        assert all(windows.get(other, (first, size)) == (first, size) for other in range(first, first + size))
    every = [grouped.step(number, samples) for number in range(steps)]
    whole = count // samples
    assert sorted(np.concatenate(every[:whole] or [np.empty(0)])) == sorted(
        np.concatenate([order.step(number, samples) for number in range(whole)] or [np.empty(0)])
    )
    for number in reversed(range(steps)):  # whatever was asked for before
        assert (again.step(number, samples) == every[number]).all()


ROWS = [{"prompt": "abc" * (n % 5), "completion": "xy" * (1 + n * n % 13 // 2)} for n in range(48)]


def uneven(folder: Path) -> str:
    data = {"format": "chat", "block": 128, "pack": False, "group_by_length": True}
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": None}
    config = {"precision": {"mode": "fp32", "reduce": {"order": "tree"}}, **sizes}
    return str(job(folder, steps=6, rows=ROWS, data=data, config=config))


def what_is_cut_off_is_behind_the_last_label(caches: Path) -> None:
    (cache,) = (file.parent for file in caches.glob("*/train.tokens"))
    blocks = open_blocks(cache, "train")
    every = blocks.read(np.arange(len(blocks))).labels
    expected = [max(np.flatnonzero(row != -100)) + 1 for row in every]
    assert lengths_of(blocks).tolist() == expected
    for batch in Feed(blocks, 0, layout(2, accumulation=4), grouped=True).step(1):
        need = max(expected[block] for block in batch.blocks)
        assert need <= batch.tokens.shape[1] < need + 8 and batch.labels.shape == batch.tokens.shape
        assert (batch.labels != -100).sum().item() == sum((every[b] != -100).sum() for b in batch.blocks)


def test_one_run_however_it_is_cut_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A resumed run, and one on two ranks, have the same losses to the last digit, with little padding."""
    found = []
    for name in ("whole", "resumed", "ranks"):
        folder = tmp_path / name
        path = uneven(folder)
        if name == "ranks":
            run_ranks(on_a_rank, 2, path, [])
        elif name == "whole":
            train(path)
            out = capsys.readouterr().out
        else:
            train(path, ["run.steps=3"])
            train(path)
        found.append(losses(folder))
    assert found[0] == found[1] == found[2] and len(found[0]) == 6
    shares = re.search(r"padding +(\S+)% of what is computed; (\S+)% without `data.group_by_length`", out)
    assert shares is not None
    grouped, plain = map(float, shares.groups())
    assert grouped < 15 and plain > 60, shares
    what_is_cut_off_is_behind_the_last_label(tmp_path / "whole" / "cache")
    with pytest.raises(ZerodriftError, match=r"`data\.group_by_length` false, which was true"):
        train(uneven(tmp_path / "whole"), ["data.group_by_length=false", "run.steps=7"])
