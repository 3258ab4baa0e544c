"""The three batch numbers: what is written, what follows, and what contradicts.

DeepSpeed's arithmetic: train = micro x accumulation x data-parallel ranks. Any two give the third; with
only `train` the accumulation is 1, with only `micro` too. Written alone, `gradient_accumulation_steps`
is enough for a caller who has a loader of his own, and so is nothing at all.

Invariant: where all three are known, the product holds exactly.
"""

from __future__ import annotations

from zerodrift.errors import Problems
from zerodrift.policy.nouns import Batch

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def arithmetic(
    train: int | None, micro: int | None, steps: int | None, ranks: int, problems: Problems
) -> tuple[Batch, str]:
    """The batch and the reason for what was not written."""
    over = "1 rank" if ranks == 1 else f"{ranks} ranks"
    if train is None:
        steps = steps or 1
        if micro is None:
            return Batch(0, steps, 0), "batch sizes are the caller's loader's"
        return Batch(micro, steps, micro * steps * ranks), f"{MICRO} x {STEPS} x {over}"
    if micro is None and steps is None:
        return Batch(_quotient(train, ranks, TRAIN, problems), 1, train), f"{TRAIN} over {over}"
    if micro is None:
        steps = steps or 1
        share = _quotient(train, ranks * steps, TRAIN, problems)
        return Batch(share, steps, train), f"{TRAIN} over {over} and {steps} micro-batches"
    if steps is None:
        share = _quotient(train, ranks * micro, TRAIN, problems)
        return Batch(micro, share, train), f"{TRAIN} over {over} of {micro}"
    if train != micro * steps * ranks:
        problems.add(
            TRAIN,
            f"must be {MICRO} x {STEPS} x data-parallel ranks, {micro} x {steps} x {ranks} = "
            f"{micro * steps * ranks}",
            got=str(train),
            do="Write two of the three; the third follows.",
        )
    return Batch(micro, steps, train), "written in full"


def _quotient(total: int, parts: int, key: str, problems: Problems) -> int:
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        problems.add(
            key,
            f"must be a multiple of {parts} (data-parallel ranks times what each step does on one)",
            got=str(total),
            do=f"Use {below} or {above}." if below else f"Use {above}, or fewer ranks.",
        )
    return max(1, total // parts)
