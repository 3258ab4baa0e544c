"""The harness itself: results, messages of failures, and no leaked processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch.distributed as dist

from tests.ranks.harness import RankFailure, run_ranks

pytestmark = pytest.mark.fresh_ranks


def fail_on(rank: int) -> None:
    print(f"rank {dist.get_rank()} says goodbye")
    if dist.get_rank() == rank:
        raise KeyError("the one that matters")
    dist.barrier()


def test_the_first_failure_is_raised_with_its_rank_and_output() -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(fail_on, 3, 1)
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 in `fail_on` raised")
    assert "KeyError: 'the one that matters'" in text
    assert "rank 1 says goodbye" in text
    assert not multiprocessing.active_children()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(60)


def test_a_hang_is_a_failure_with_stacks_within_the_limit() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(hang_on, 2, 1, timeout=2)
    assert time.monotonic() - began < 5
    text = str(caught.value)
    assert text.startswith("ranks 1 of 2 in `hang_on` did not answer in time")
    assert "in hang_on" in text
    assert "output of rank 0" not in text
    assert not multiprocessing.active_children()


def die_on(rank: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def test_a_rank_that_dies_is_a_failure_unless_it_was_meant_to() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 in `die_on` died with exit code -9"):
        run_ranks(die_on, 2, 1)
    assert run_ranks(die_on, 2, 1, dying={1}) == [0, None]
