"""The harness itself: results, messages of failures, and no leaked processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.harness import RankFailure, kept_processes, kept_ranks, on_ranks, run_ranks

pytestmark = pytest.mark.fresh_ranks


def answer(text: str) -> tuple[int, int, str, torch.Tensor]:
    print("not a word of this is lost, or seen", flush=True)
    total = torch.ones(2)
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), text, total


def test_results_come_back_in_rank_order() -> None:
    found = run_ranks(answer, 3, "hello")
    assert [(rank, threads, text) for rank, threads, text, _ in found] == [
        (rank, 1, "hello") for rank in range(3)
    ]
    assert all(total.tolist() == [3.0, 3.0] for *_, total in found)


@on_ranks(1)
def test_ranks_begin_with_everything_imported() -> None:
    """A wrong name would only make tests slow."""
    pytest.importorskip("transformers")
    listed = sys.modules["tests.ranks.preload"].MODULES
    assert all(name in sys.modules for name in listed), set(listed) - set(sys.modules)


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


def cannot_answer() -> object:
    return lambda: None


def test_a_result_that_cannot_be_pickled_is_a_failure() -> None:
    with pytest.raises(RankFailure, match="cannot_answer"):
        run_ranks(cannot_answer, 1)


def changing(change: str) -> tuple[int, str, bool, float]:
    """Return the rank and its state; then change this state."""
    found = os.getpid(), os.getcwd(), "CHANGED" in os.environ, float(torch.rand(()))
    os.chdir("/")
    os.environ["CHANGED"] = "yes"
    if change == "a group":
        dist.new_group()
    elif change == "an error":
        raise KeyError(change)
    return found


def test_ranks_are_kept_unless_something_is_left_in_them() -> None:
    with kept_ranks():
        first, second = run_ranks(changing, 2, ""), run_ranks(changing, 2, "a group")
        assert first == second, "the same processes, and as they began"
        assert not kept_processes()
        third = run_ranks(changing, 3, "")
        assert not {rank[0] for rank in second} & {rank[0] for rank in third}
        assert run_ranks(changing, 2, "") == third[:2] and len(kept_processes()) == 3
        with pytest.raises(RankFailure, match="an error"):
            run_ranks(changing, 3, "an error")
        assert not kept_processes()
        assert run_ranks(changing, 1, "")
    assert not multiprocessing.active_children()
    assert run_ranks(changing, 1, "") and not kept_processes()
