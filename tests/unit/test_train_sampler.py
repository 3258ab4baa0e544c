"""Which blocks a step sees, and how much each micro-batch counts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.data_files import layout
from zerodrift.train.data.batches import Feed, validation_batches
from zerodrift.train.data.blocks import Blocks, Rows
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


def blocks(folder: Path, count: int, length: int = 8, partly: bool = True) -> Blocks:
    tokens = np.arange(count * length, dtype=np.uint16)
    tokens.tofile(folder / "tokens")
    maps = (Rows.of(folder / "tokens", tokens.dtype, length),)
    if not partly:
        return Blocks(maps, None, None, length, tokens.size)
    learned = np.zeros((count, length), dtype=np.uint8)
    for row in range(count):
        learned[row, : 2 + row % (length - 2)] = 1
    learned.tofile(folder / "learned")
    marks = Rows.of(folder / "learned", learned.dtype, length)
    return Blocks(maps, marks, learned[:, 1:].sum(1).astype(np.int32), length, tokens.size)


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 6, 1), (2, 3, 1), (1, 2, 3), (3, 1, 2)])
def test_weights_make_the_mean_over_all_labels_of_the_step(
    ranks: int, micro: int, accumulation: int, tmp_path: Path
) -> None:
    """The average over ranks and micro-batches of weight x mean is the mean over the step's labels."""
    data = blocks(tmp_path, 20)
    values = np.random.default_rng(0).normal(size=20)
    chosen = BlockSampler(20, 0).step(2, 6)
    counts = data.labels(chosen)
    expected = (values[chosen] * counts).sum() / counts.sum()
    found = []
    for rank in range(ranks):
        for batch in Feed(data, 0, layout(micro, rank, ranks, accumulation)).step(2):
            mine = data.labels(batch.blocks)
            mean = (values[batch.blocks] * mine).sum() / mine.sum()
            found.append(batch.weight * mean)
            assert ((batch.labels != -100)[:, 1:].sum(1).numpy() == mine).all()
    assert np.isclose(np.mean(found), expected, rtol=1e-12)


def test_whole_blocks_weigh_one_and_share_their_tensor(tmp_path: Path) -> None:
    for batch in Feed(blocks(tmp_path, 20, partly=False), 0, layout(2, 0, 2, 3)).step(0):
        assert batch.weight == 1.0
        assert batch.labels is batch.tokens


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_held_out_block_counts_once_and_ranks_do_as_many_forwards(ranks: int, tmp_path: Path) -> None:
    data = blocks(tmp_path, 7)
    found = [list(validation_batches(data, layout(2, rank, ranks), most=10)) for rank in range(ranks)]
    assert len({len(each) for each in found}) == 1
    counted = [batch.blocks for each in found for batch, labels in each if labels]
    assert sorted(np.concatenate(counted)) == list(range(7))
    assert sum(labels for each in found for _, labels in each) == data.labels(np.arange(7)).sum()
    assert len(list(validation_batches(data, layout(2), most=2))) == 1
