"""The digest of a state has its definition over whole values, for any slices; and copies are compared."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.numerics.networks import GPT
from tests.numerics.runs import config, finish, make, train
from tests.ranks.harness import on_ranks
from zerodrift.engine.digest import MOMENTS, VISIBLE, WEIGHTS
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError

WORD = (1 << 64) - 1


def mixed(word: int) -> int:
    """Apply the last steps of SplitMix64."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def by_definition(kind: str, what: str, name: str, values: Tensor) -> int:
    key = hashed(f"0:{kind} {what} {name}")
    words = values.contiguous().view(-1).view({2: torch.int16, 4: torch.int32}[values.itemsize]).cpu().numpy()
    unsigned = words.view({2: np.uint16, 4: np.uint32}[values.itemsize]).astype(np.uint64)
    places = np.array([hashed(f"place {place}") | 1 for place in range(256)], dtype=np.uint64)
    total = 0
    for block in range(-(-len(unsigned) // 256)):
        part = unsigned[256 * block : 256 * (block + 1)]
        inside = int((part * places[: len(part)]).sum(dtype=np.uint64))
        total += inside * (mixed(((block + 1) * 0x9E3779B97F4A7C15 + key) & WORD) | 1)
    return total


def of_whole_values(engine: Engine) -> str:
    run = finish(engine)
    total = sum(by_definition(WEIGHTS, "", name, values) for name, values in run.masters.items())
    total += sum(by_definition(VISIBLE, "", name, values) for name, values in run.weights.items())
    for name, state in run.states.items():
        total += sum(by_definition(MOMENTS, what, name, values) for what, values in state.items())
    return f"{total & WORD:016x}"


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_it_is_that_of_whole_weights_masters_and_moments(stage: int) -> None:
    """`test_order_families.py` compares it over stages and ranks."""
    engine = make(config(stage, "bf16"), GPT(layers=1))
    train(engine, 2)
    assert str(engine.digest()) == of_whole_values(engine)


@pytest.mark.parametrize(("world", "stage", "replicate", "bad"), [(2, 3, 2, 1), (4, 0, 1, 2)])
@on_ranks("world")
def test_a_rank_whose_copy_differs_is_named_on_all(world: int, stage: int, replicate: int, bad: int) -> None:
    """One rank has another bit in its master; the majority of several is right."""
    engine = make({**config(stage, "bf16"), "sharding": {"replicate": replicate}}, GPT(layers=1))
    train(engine, 1)
    engine.digest()
    if dist.get_rank() == bad:
        assert engine.updater is not None
        values = engine.updater.master(0)
        values.view(torch.int32)[3] ^= 1
        engine.updater.set_master(0, values)
    told = "rank 2 than on ranks 0, 1, 3" if world == 4 else "(rank 0 than on rank 1|rank 1 than on rank 0)"
    with pytest.raises(RankError, match=f"different bits on {told}"):
        engine.digest()
