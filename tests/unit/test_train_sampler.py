"""Which blocks a step sees, and how much each micro-batch counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_files import data, layout, made
from zerodrift.train.data.batches import Feed
from zerodrift.train.data.sampling import BlockSampler, blocks_of, permute


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_an_epoch_has_every_block_once(count: int) -> None:
    sampler = BlockSampler(count, seed=3)
    for epoch in range(3):
        found = [sampler.at(epoch * count + place) for place in range(count)]
        assert sorted(found) == list(range(count))


def test_epochs_and_seeds_differ_and_repeat_and_an_order_looks_like_chance() -> None:
    first, again, other, next_epoch = (
        [BlockSampler(1000, seed).at(begin + place) for place in range(1000)]
        for seed, begin in ((3, 0), (3, 0), (4, 0), (3, 1000))
    )
    assert first == again and first != other and first != next_epoch
    order = np.array([permute(place, 4096, key=99) for place in range(4096)])
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    gaps = np.abs(np.diff(order))
    assert 0.28 < gaps.mean() / 4096 < 0.39, "two random places are a third apart"


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 2, 6), (2, 3, 2), (4, 1, 3), (6, 2, 1)])
def test_a_step_has_the_same_blocks_on_any_number_of_ranks(ranks: int, micro: int, accumulation: int) -> None:
    chosen = BlockSampler(100, 0).step(7, 12)
    found = [
        blocks_of(chosen, turn * ranks + rank, micro) for rank in range(ranks) for turn in range(accumulation)
    ]
    assert sorted(np.concatenate(found)) == sorted(chosen)


def test_whole_blocks_weigh_one_and_share_their_tensor(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    np.arange(160, dtype=np.uint16).tofile(file)
    for batch in Feed(made(tmp_path, data(file, block=8)).train, 0, layout(2, 0, 2, 3)).step(0):
        assert batch.weight == 1.0
        assert batch.labels is batch.tokens
