"""Refusals of narrow gathers and wires, each with its reason and the way out.

`columns.py` and `resolver.py` refuse by these values, and the support table lists them.

Invariant: a combination is refused here by name, or it runs as the plan says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NarrowRefusal:
    """A combination that is not supported."""

    column: str
    """The key that is refused."""
    what: str
    """The combination, for a list."""
    rule: str
    """Requirement of the key, after "must"."""
    reason: str
    do: str

    @property
    def must(self) -> str:
        return f"`{self.column}` must {self.rule}: {self.reason}"


FROZEN = NarrowRefusal(
    "gather",
    "a frozen parameter",
    "not be narrow for a frozen parameter",
    "it never changes, and would be rounded at each gather",
    "Use `storage` for it.",
)
STORAGE = NarrowRefusal(
    "storage",
    "sharded storage in another dtype than fp32 under a narrow gather",
    "be fp32 where `gather` is narrow and storage is sharded",
    "what is gathered is encoded from it, and it is its own master",
    "Leave `storage` out.",
)
MASTER = NarrowRefusal(
    "master",
    "another master than fp32 under a narrow gather of whole storage",
    "be fp32 where `gather` is narrow and storage is whole",
    "storage then shows what has travelled",
    "Leave `master` out, or use stage 3.",
)
SUM = NarrowRefusal(
    "reduce.sum",
    "a sum in another dtype than fp32 under a narrow wire",
    "be fp32 where the wire is narrow",
    "every part is decoded to fp32",
    "Leave `reduce.sum` out.",
)
NO_WIRE = NarrowRefusal(
    "reduce.feedback",
    "feedback on a plain wire",
    "have a narrow wire",
    "there is little to give back",
    "Set `reduce.wire` to a narrow format, such as int4.",
)
NEAREST = NarrowRefusal(
    "reduce.rounding",
    "stochastic rounding on a plain wire",
    "have a narrow wire",
    "a cast to a plain dtype rounds to the nearest value",
    "Set `reduce.wire` to a narrow format, such as int4.",
)
SCALED = NarrowRefusal(
    "reduce.feedback",
    "feedback with a loss scale",
    "be in a mode without a loss scale",
    "a scale that changes from step to step would change what was lost",
    "Use mode bf16.",
)
ACCUMULATE = NarrowRefusal(
    "reduce.feedback",
    "feedback without an fp32 accumulator",
    "have an fp32 `accumulate`",
    "what was lost is added to it",
    "Leave `accumulate` out.",
)
TWICE = NarrowRefusal(
    "reduce.feedback",
    "feedback with replicas or expert parallelism",
    "be left out with replicas or expert parallelism",
    "their sums are rounded once more, by ranks that do not keep it",
    "Leave `sharding.replicate` and `experts` out, or the feedback.",
)
WIRE_BACKEND = NarrowRefusal(
    "reduce.wire",
    "a narrow wire on backend fsdp2",
    "not be narrow on backend fsdp2",
    "`fully_shard` cuts gradients where blocks do not end",
    "Use the native backend.",
)
GATHER_BACKEND = NarrowRefusal(
    "gather",
    "a narrow gather on backend fsdp2",
    "not be narrow on backend fsdp2",
    "`fully_shard` casts before it gathers, and cuts weights where blocks do not end",
    "Use the native backend.",
)

TRAVEL = (
    FROZEN,
    STORAGE,
    MASTER,
    GATHER_BACKEND,
    SUM,
    NO_WIRE,
    NEAREST,
    SCALED,
    ACCUMULATE,
    TWICE,
    WIRE_BACKEND,
)
"""All that narrow gathers and wires are refused with, beside `order: tree` and `order: native`."""

SLICED = "formats with a scale per row or tile do not travel: a slice would cut their blocks"
