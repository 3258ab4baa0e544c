"""The order of sums: `reduce.order`, its default, and the micro-batches of each rank under the tree.

The micro-batches of a step are numbered over all ranks, and their gradients are summed by one binary tree: a
node of level k is the sum of 2^k neighbours, left + right. Gradients are summed in three turns: over the
micro-batches of a rank, over the ranks of a shard group, over replicas; with `when: every` the second turn
comes first. So the tree is the same on any number of ranks if every turn sums aligned blocks of a power of
two. `comm/fold.py` has the tree and the exchange of halves.

The end of this file lists the keys that ask for deterministic operations, and the operations for which torch
has no deterministic kernel on CUDA.

Invariant: pure, and without torch. Every micro-batch belongs to one rank, and the numbers of a rank increase.

[Note: refused on CUDA] The rows are the operations for which torch 2.13 raises on CUDA, and one that adds in
no fixed order without raising. Torch's documentation also names operations that no longer raise, because
they have a deterministic kernel now: cumsum, index_add, ReflectionPad2d and others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from zerodrift.config import Config
from zerodrift.errors import Problems, listed, several
from zerodrift.mesh import MeshShape
from zerodrift.policy.decisions import Averaging, Columns, Decision, Exclusion, Order, Pipelining, Policy
from zerodrift.policy.pipelining import most_unfinished, queues

When = Literal["last", "every"]
WHENS: tuple[When, ...] = ("last", "every")

KEY = "precision.reduce.order"


def micro_batches_of_rank(when: When, micro_batches: int, mesh: MeshShape, rank: int) -> tuple[int, ...]:
    """Return a data rank's micro-batch numbers in increasing order; each rank has `micro_batches`."""
    replica, shard = divmod(rank, mesh.shard)
    first = replica * mesh.shard * micro_batches
    if when == "every":
        return tuple(first + number * mesh.shard + shard for number in range(micro_batches))
    return tuple(first + shard * micro_batches + number for number in range(micro_batches))


def is_tree(when: When, micro_batches: int, shard: int, replicate: int) -> bool:
    """Return True if the sums of every turn but the last are whole nodes of the tree."""
    turns = (shard, micro_batches) if when == "every" else (micro_batches, shard)
    first, both = turns[0], micro_batches * shard
    is_node = first & (first - 1) == 0 or turns[1] * replicate == 1
    return is_node and (both & (both - 1) == 0 or replicate == 1)


def assignment(whens: Collection[When], micro_batches: int, mesh: MeshShape) -> When | None:
    """Return the `reduce.when` whose assignment of micro-batches makes the tree, or None if there is none.

    `whens` are the reduction times of all segments.
    """
    alike = len(set(whens)) < 2 or micro_batches == 1 or mesh.shard == 1
    served = all(is_tree(when, micro_batches, mesh.shard, mesh.replicate) for when in whens)
    return next(iter(whens), "last") if alike and served else None


def numbers_of_ranks(whens: Collection[When], total: int, replicate: int) -> tuple[int, ...]:
    """Return the numbers of data ranks that can sum `total` micro-batches by the tree.

    Without replicas 1 is one of the numbers.
    """
    low = [number for number in range(1, int(total**0.5) + 1) if total % number == 0]
    return tuple(
        ranks
        for ranks in sorted({*low, *(total // number for number in low)})
        if ranks % replicate == 0
        and assignment(whens, total // ranks, MeshShape(ranks // replicate, replicate)) is not None
    )


def refuse_ranks(whens: Iterable[When], micro_batches: int, mesh: MeshShape, problems: Problems) -> None:
    """Refuse a number of ranks whose sums are no nodes of the tree."""
    times = sorted(set(whens))
    if assignment(times, micro_batches, mesh) is not None:
        return
    total = micro_batches * mesh.data
    if len(times) > 1:
        must = "must be `rank` with two `reduce.when`: each assigns other micro-batches to a rank"
    elif times == ["last"]:
        must = (
            "must be `rank` unless each rank, which sums its own first, has a power of two of micro-batches"
        )
    else:
        must = "must be `rank` unless the ranks, which sum every micro-batch first, are a power of two"
    if mesh.replicate > 1:
        must += ", and so are the micro-batches of a replica"
    ranks = numbers_of_ranks(times, total, mesh.replicate)
    numbers = listed(ranks, "or")
    uses = [f"Use {numbers} ranks for these {total} micro-batches" if ranks else "Use fewer replicas"]
    uses += [
        f"set `reduce.when: {when}` for all"
        for when in WHENS
        if times != [when] and assignment([when], micro_batches, mesh) is not None
    ]
    there = several(micro_batches, "micro-batch", "micro-batches")
    do = f"{'; or '.join([*uses, 'leave `order` out'])}."
    problems.add(KEY, must, got=f"tree, {there} on each of {several(mesh.data, 'rank')}", do=do)


def accumulators(micro_batches: int) -> int:
    """Return the most partial sums that wait at once on a rank that adds its micro-batches one by one."""
    return (micro_batches + 1).bit_length() - 1


def rank_levels(ranks: int) -> int:
    """Return the most partial sums beside the result at once in a sum over `ranks`."""
    return max(0, (ranks - 1).bit_length() - 1)


BACKEND = Exclusion(
    "backend fsdp2", "PyTorch's `fully_shard` adds micro-batches in an order of its own", "Use backend native"
)
QUEUE = Exclusion(
    "weight gradients from a queue",
    "a queue rounds them at other places than a backward does",
    "Leave `pipeline.weight_grads` and `sharding.keep_gathered` out",
)
TIED = Exclusion(
    "weights tied across ranks of a pipeline",
    "all uses of a tied weight in a micro-batch are one part of the tree, and no rank has all of them",
    "Untie them, or use schedule `zbv` or `dualpipev`, whose first and last piece are on one rank",
)
EXPERTS = Exclusion(
    "expert parallelism",
    "the tokens of several micro-batches meet in one product, which is rounded as a whole",
    "Leave `experts` out",
)
TENSOR = Exclusion(
    "tensor parallelism",
    "the model's own sums over the ranks of a DTensor depend on their number",
    "Build the model without it",
)
BEFORE = Exclusion(
    "division before the reduction",
    "the rounding then depends on the number of ranks",
    "Leave `prescale_gradients` and `gradient_predivide_factor` out",
)
SUM = Exclusion(
    "`gradient_allreduce_op: sum`",
    "the gradient is divided by the micro-batches of a rank, whose number depends on the number of ranks",
    "Leave `gradient_allreduce_op` out",
)
WIRE = Exclusion(
    "a wire or accumulator of another dtype than the sum",
    "a rank rounds its sum to send it, at other places on another number of ranks",
    "Let `accumulate`, `reduce.wire` and `reduce.sum` be one dtype",
)
CARRIED = Exclusion(
    "a wire of another dtype than the sum",
    "NCCL adds in the dtype that it sends",
    "Let `reduce.wire` and `reduce.sum` be one dtype",
)
RULE = Exclusion("another order in a rule", "all parameters share one", "Write it in `precision.reduce`")

RANKS = Exclusion(
    "other numbers of ranks",
    "the first sums of ranks must be whole nodes of the tree: a power of two of neighbours",
    "The error names the numbers of ranks that fit",
)

_EXCLUDED = (RANKS, BACKEND, QUEUE, TIED, EXPERTS, TENSOR, BEFORE, SUM, WIRE)

REFUSED = (*_EXCLUDED, RULE)
"""Everything that `order: tree` refuses."""

AUTOCAST = Exclusion(
    "autocast",
    "gradients of safe modules travel in the autocast dtype, and a rank rounds its sum to send it",
    "Write `order: tree`, which sends them in fp32",
)
MANY = 64
"""Least ranks of a shard group on which the default keeps several sums of slices. A slice is then at most a
64th of the gradients, and in the order of ranks most parts of a sum would cross the network."""
MEMORY = Exclusion(
    "more than 2 micro-batches on a rank, or more than 1 in a pipeline",
    "the tree keeps several partial sums where the order of ranks keeps one, unless they are slices on "
    f"{MANY} ranks or more",
    "Write `order: tree` where there is memory for them",
)

DEFAULT_RANK = (*_EXCLUDED, AUTOCAST, MEMORY)
"""Features with which the order of ranks is the default."""

GIVEN_UP = "the same bits at every stage, and in every run, are given up"

ORDER = "order of sums"
"""Key of the decision on the order."""
BY_RANK = "by rank: different bits on another number of ranks"
SAME_BITS = {
    True: "the same bits on any number of ranks",
    False: "the same bits on every number of ranks that uses this order",
}
"""Promise of the tree, by whether the config asks for it."""
_IN_WORDS: dict[Order, str] = {"rank": BY_RANK, "native": "NCCL's own"}


def decide_order(
    config: Config,
    mesh: MeshShape,
    averaging: Averaging,
    pipeline: Pipelining | None,
    narrows: bool,
    written: str,
    problems: Problems,
) -> tuple[Order, str]:
    """Return the order of sums and its reason. `written` is the config's word, `auto` without one.

    `narrows` is True if autocast chooses a narrow wire for some gradients. A feature that excludes `tree` is
    refused if `tree` is written, and makes `rank` the default. `for_parameters` checks the parameters.
    """
    for number, rule in enumerate(config.precision.rules):
        if getattr(rule.reduce, "order", None) not in (None, written):
            must, do = f"must be that of `precision.reduce`: {RULE.reason}", f"{RULE.do}."
            problems.add(f"precision.rules[{number}].reduce.order", must, got="another", do=do)
    excluding = [
        refusal
        for refusal, holds in (
            (BACKEND, config.backend not in (None, "native")),
            (QUEUE, queues(pipeline)),
            (EXPERTS, mesh.expert > 1),
            (TENSOR, mesh.tensor > 1),
            (BEFORE, averaging.before != 1.0),
            (SUM, not averaging.mean),
        )
        if holds
    ]
    if written == "auto":
        excluding += [AUTOCAST] if narrows else []
        return ("rank", _by_default(excluding[0])) if excluding else ("tree", "default")
    if written == "tree":
        for refusal in excluding:
            refuse_order(refusal, KEY, problems)
    order: Order = written  # type: ignore[assignment]
    return order, f"`{KEY}`: {GIVEN_UP}" if order == "native" else f"`{KEY}`"


def _by_default(refusal: Exclusion, reason: str = "") -> str:
    return f"default with {refusal.what}: {reason or refusal.reason}"


def decisions(order: Order, why: str, requires_tree: bool) -> tuple[Decision, ...]:
    """Return the decisions that follow from the order of sums."""
    value = _IN_WORDS.get(order, f"tree over micro-batches: {SAME_BITS[requires_tree]}")
    found = (Decision(ORDER, value, why),)
    if not requires_tree:
        return found
    why = f"{why}: torch refuses others while the engine is there"
    return (*found, Decision("operations", "deterministic", why))


def for_parameters(policy: Policy, columns: Iterable[Columns], mesh: MeshShape, tied: bool) -> Policy:
    """Return a policy whose default order of sums serves these parameters.

    `tied` is True if some of them are tied across pieces of a pipeline.
    """
    if policy.requires_tree or not policy.tree:
        return policy
    found = _excluding_parameters(policy, columns, mesh, tied)
    if found is None:
        return policy
    why = _by_default(*found)
    others = (demand for demand in policy.demands if demand[0] != "reduce.order")
    return replace(
        policy,
        demands=(*others, ("reduce.order", "rank", why)),
        decisions=tuple(
            Decision(ORDER, BY_RANK, why) if each.key == ORDER else each for each in policy.decisions
        ),
    )


def _excluding_parameters(
    policy: Policy, columns: Iterable[Columns], mesh: MeshShape, tied: bool
) -> tuple[Exclusion, str] | None:
    updates = {kind.update for kind in columns if kind.update is not None}
    if any(not update.accumulate.dtype is update.reduce.wire is update.reduce.sum for update in updates):
        return WIRE, ""
    if tied:
        return TIED, ""
    count = policy.batch.accumulation
    whens = sorted({update.reduce.when for update in updates})
    if assignment(whens, count, mesh) is None:
        fit = numbers_of_ranks(whens, count * mesh.data, mesh.replicate)
        each = f"{several(count, 'micro-batch', 'micro-batches')} on each of {several(mesh.data, 'rank')}"
        others = f"; {listed(fit, 'or')} ranks do" if fit else ""
        return RANKS, f"{each} make no whole nodes of the tree{others}"
    for when in whens:
        is_sliced = when == "every" and mesh.shard > 1
        sums, is_thin = accumulators(count), is_sliced and mesh.shard >= MANY
        if policy.pipeline is not None:
            unfinished = most_unfinished(policy.pipeline, mesh.pipeline, count)
            sums = unfinished + (sums - 1 if is_sliced else count.bit_length() - 1)
            is_thin = is_thin and unfinished == 1
        if sums > 1 and not is_thin:
            kept = "slices of" if is_sliced else "whole"
            return MEMORY, f"the tree would keep {sums} sums of {kept} gradients, the order of ranks keeps 1"
    return None


def refuse_order(refusal: Exclusion, where: str, problems: Problems, got: str = "tree") -> None:
    must = f"must be `rank` with {refusal.what}: {refusal.reason}"
    problems.add(where, must, got=got, do=f"{refusal.do}; or leave `order` out.")


# --- deterministic operations ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeterminismNeed:
    """The key that asks for deterministic operations, as errors name it."""

    key: str
    value: str
    instead: str
    """The value that asks for nothing."""


def need_of(is_tree: bool, digest_every: int = 0) -> DeterminismNeed | None:
    """Return what asks for deterministic operations: the order of sums, or digests of a run."""
    if is_tree:
        return DeterminismNeed("precision.reduce.order", "tree", "rank")
    return DeterminismNeed("run.digest_every", str(digest_every), "0") if digest_every else None


_POOL = "Use `unflatten` and `mean`, where windows do not overlap, or a convolution with strides"
_UPSAMPLE = "Use mode `nearest`, `bilinear` or `trilinear`, without `antialias`"
_PAD = "Use mode `replicate`"

REFUSED_ON_CUDA: Mapping[str, str] = {
    "avg_pool3d_backward": _POOL,
    "adaptive_avg_pool2d_backward": _POOL,
    "adaptive_avg_pool3d_backward": _POOL,
    "adaptive_max_pool2d_backward": "Use `max_pool2d` with a kernel size",
    "adaptive_max_pool3d_backward": "Use `max_pool3d` with a kernel size",
    "fractional_max_pool2d_backward": "Use `max_pool2d`",
    "fractional_max_pool3d_backward": "Use `max_pool3d`",
    "max_unpool": "Use `scatter`",
    "upsample_linear1d_backward": _UPSAMPLE,
    "upsample_bicubic2d_backward": _UPSAMPLE,
    "upsample_bilinear2d_aa_backward": _UPSAMPLE,
    "upsample_bicubic2d_aa_backward": _UPSAMPLE,
    "reflection_pad1d_backward": _PAD,
    "reflection_pad3d_backward": _PAD,
    "grid_sampler_2d_backward": "Use `gather` for the neighbours of each place",
    "grid_sampler_3d_backward": "Use `gather` for the neighbours of each place",
    "nll_loss2d_forward": "Give the loss flat predictions, of shape [places, classes]",
    "ctc_loss_backward": "Give the loss targets that cuDNN takes: flat int32 on the CPU, with blank 0",
    "embedding_bag_backward": "Use mode `sum` or `mean`; only `max` is refused",
    "put": "Use `index_put`",
    "histc": "Give it whole numbers, or use `bincount`",
    "bincount": "Use `index_add` for the weights",
    "median": "Use `kthvalue`",
    "nanmedian": "Use `kthvalue`",
    "scatter_reduce": "Use `reduce='sum'`, `'mean'`, `'amax'` or `'amin'`; only a product is refused",
    "index_reduce": "Use `scatter_reduce`",
}
"""Start of an operation's name, in a trace or in torch's error -> what to use.

See [Note: refused on CUDA]."""

SILENT = frozenset(["adaptive_max_pool3d_backward"])
"""Operations of `REFUSED_ON_CUDA` that torch runs nevertheless."""


def remedy(name: str) -> str | None:
    """Return what to use for an operation of aten, or of torch's error; None for one that may stay."""
    name = name.lstrip("_")
    return next((do for start, do in REFUSED_ON_CUDA.items() if name.startswith(start)), None)
