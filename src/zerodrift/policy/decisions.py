"""The values of a policy: modes, columns, rules, and every decision that is not a dtype.

`resolve` makes these values from a config, `columns` applies them to one parameter, the plan carries them and
the engine follows them. Section 2 of `docs/architecture.md` explains the columns.

Invariant: nothing here is undecided. `None` means "there is none" (a frozen parameter has no update, a run
without fp16 has no loss scale), never "to be filled in".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any, Literal

from zerodrift.config import BackendName
from zerodrift.dtypes import DType
from zerodrift.optimizers import of_type

COLUMNS = ("storage", "gather", "compute", "grad", "accumulate", "reduce", "master", "state", "export")
"""The columns, in the order in which every table shows them."""


class _TextEnum(enum.Enum):
    """An enum that prints as its value. It hashes by identity, as `DType` does."""

    __hash__ = object.__hash__

    def __str__(self) -> str:
        return str(self.value)


class Mode(_TextEnum):
    """The recipe that the columns start from."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    AUTOCAST_BF16 = "autocast-bf16"
    AUTOCAST_FP16 = "autocast-fp16"

    @property
    def autocast(self) -> bool:
        return self in (Mode.AUTOCAST_BF16, Mode.AUTOCAST_FP16)

    @property
    def dtype(self) -> DType:
        """The low dtype of the mode (fp32 for `fp32`)."""
        return DType(self.value.removeprefix("autocast-"))

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled, because gradients pass through fp16."""
        return self.dtype is DType.FP16


class Master(_TextEnum):
    """The values that the optimizer updates."""

    FP32 = "fp32"
    SPLIT = "split"
    """Exact fp32: bf16 storage holds the high half, 16 extra bits the low half."""
    SAME = "same"


class State(_TextEnum):
    """The optimizer's moments, and how they are rounded."""

    FP32 = "fp32"
    BF16 = "bf16"
    BF16_STOCHASTIC = "bf16-stochastic"
    EIGHT_BIT = "8bit"
    """A code per element and an fp32 scale per block, rounded stochastically."""

    @property
    def dtype(self) -> DType:
        """Dtype of one element in memory; `8bit` adds a scale per block."""
        return {State.FP32: DType.FP32, State.EIGHT_BIT: DType.UINT8}.get(self, DType.BF16)

    @property
    def drawn(self) -> bool:
        return self in (State.BF16_STOCHASTIC, State.EIGHT_BIT)


Axis = Literal["", "shard"]
"""The sharding of a column: whole on every rank (`""`), or an equal slice per rank (`"shard"`)."""

Placement = Literal["sliced", "matrices", "whole"]
"""The places where a slice may end: anywhere, between matrices, or between parameters only."""

MuonUpdate = Literal["", "Muon", "AdamW"]
"""The part of an optimizer that updates a parameter; `""` if the optimizer updates all parameters alike."""

Parallel = Literal["", "expert"]
"""`"expert"` divides the first dimension of a parameter over the ranks of the expert axis, before any column
is sharded. Every column then covers a rank's own experts."""

OPTIONS = ("products", "placement", "optimizer", "parallel")
"""The options of a parameter beside its columns; tables show unusual values only."""

Output = Literal["keep", "input"]
"""The dtype that a module with a boundary returns: its own (`keep`) or its input's (`input`)."""


@dataclass(frozen=True, slots=True)
class Placed:
    dtype: DType
    axis: Axis


Order = Literal["rank", "tree", "native"]


@dataclass(frozen=True, slots=True)
class Reduction:
    """The dtypes, the time and the order of a gradient reduction over ranks."""

    wire: DType
    sum: DType
    when: Literal["last", "every"]
    order: Order = field(default="rank", metadata={"omitted": True})
    """Sum in the order of ranks, by one tree (`policy/order.py`), or in NCCL's order."""
    feedback: bool = field(default=False, metadata={"omitted": True})
    """Whether what rounding to the wire has lost is added to the next gradient."""
    rounding: Literal["nearest", "stochastic"] = field(default="nearest", metadata={"omitted": True})
    """The rounding to a narrow wire."""


@dataclass(frozen=True, slots=True)
class LinearProducts:
    """The dtypes of the operands in the three products of a linear layer: fp8, or the compute dtype."""

    forward: DType
    grad_input: DType
    grad_weight: DType
    pad: bool = field(default=False, metadata={"omitted": True})
    """Fill up sizes that are no multiples of 16 with zeros where a device needs that."""

    def describe(self, trained: bool) -> str:
        """Return the products as the word that sets them, or one by one."""
        cells = {"forward": self.forward, "grad_input": self.grad_input, "grad_weight": self.grad_weight}
        words = {name: str(dtype).removesuffix("-row") for name, dtype in cells.items()}
        if not trained:
            del words["grad_weight"]
        text = ", ".join(f"{name} {word}" for name, word in words.items())
        narrow = [name for name, word in words.items() if word == "fp8"]
        if len(narrow) == len(words):
            text = "fp8"
        elif narrow == ["forward", "grad_input"]:
            text = "fp8-hp-grad-weight"
        return f"{text}, padded" if self.pad else text


@dataclass(frozen=True, slots=True)
class Update:
    """The columns that only a trained parameter has."""

    grad: DType
    accumulate: Placed
    reduce: Reduction
    master: Master
    state: State
    axis: Axis
    placement: Placement = "sliced"
    optimizer: MuonUpdate = ""


@dataclass(frozen=True, slots=True)
class Columns:
    """Every column of one parameter. Rows that agree share one object."""

    storage: Placed
    gather: DType
    compute: DType
    update: Update | None
    export: DType
    output: Output | None
    """Output that a rule sets; None without such a rule. Boundaries decide the outputs of modules."""
    pinned: bool
    """Whether a rule holds this parameter to fp32 in every column."""
    why: tuple[tuple[str, str], ...]
    """(name, reason) for every column of the parameter, in the order of COLUMNS and OPTIONS."""
    parallel: Parallel = field(default="", metadata={"omitted": True})
    products: LinearProducts | None = field(default=None, metadata={"omitted": True})
    """The products of a linear layer's weight; None where all operands are in the compute dtype."""
    asked: tuple[tuple[str, str], ...] = field(default=(), compare=False, metadata={"omitted": "always"})
    """(column or `reduce.wire`, key or rule) for every column that the config sets; the mode or a default
    decides the rest. `Plan.to_json` writes the pairs beside the columns; digests do not depend on them."""

    @property
    def trained(self) -> bool:
        return self.update is not None

    @property
    def rounds_on_the_way(self) -> bool:
        """Whether the model computes with other values than the masters rounded to a plain dtype."""
        return self.trained and self.gather.format is not None

    @property
    def encodes(self) -> bool:
        """Whether a gather encodes sharded fp32 storage."""
        return (
            self.gather.format is not None and self.storage.axis != "" and self.storage.dtype.format is None
        )

    @property
    def regather(self) -> DType:
        """Dtype of the second copy that a backward gathers from: the narrower of `gather` and `compute`."""
        narrower = self.gather.format is not None or self.gather.size < self.compute.size
        return self.gather if narrower else self.compute

    @property
    def layout(self) -> tuple[Any, ...]:
        """The columns that all rows of a segment share: not the reasons, export, output and products."""
        return (self.storage, self.gather, self.compute, self.update, self.parallel)

    def cells(self) -> dict[str, str]:
        """Return the text of each column in tables; `-` for a column that a frozen parameter lacks."""
        shown = {
            "storage": _placed(self.storage),
            "gather": str(self.gather),
            "compute": str(self.compute),
            "export": str(self.export),
        }
        update = self.update
        if update is not None:
            reduce = update.reduce
            wire = str(reduce.wire) if reduce.wire is reduce.sum else f"{reduce.wire}>{reduce.sum}"
            shown |= {
                "grad": str(update.grad),
                "accumulate": _placed(update.accumulate),
                "reduce": wire,
                "master": f"{update.master}{'/' if update.axis else ''}",
                "state": f"{update.state}{'/' if update.axis else ''}",
            }
        return {column: shown.get(column, "-") for column in COLUMNS}

    def options(self) -> dict[str, str]:
        update = self.update
        options: dict[str, str] = {"parallel": self.parallel}
        if update is not None:
            options = {"placement": update.placement, "optimizer": update.optimizer, **options}
        if self.products is not None:
            options = {"products": self.products.describe(self.trained), **options}
        elif any(name == "products" for name, _ in self.why):
            options = {"products": str(self.compute), **options}
        return {option: value for option, value in options.items() if value not in ("", "sliced")}

    def reasons(self) -> dict[str, str]:
        return dict(self.why)


def _placed(placed: Placed) -> str:
    return f"{placed.dtype}{'/' if placed.axis else ''}"


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision that is not a column: its key, its value and its reason."""

    key: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A feature that a choice excludes, or a value that a column may not have, with the way out."""

    what: str
    reason: str
    do: str
    column: str = ""
    """The refused column; `""` where the choice that excludes the feature is refused."""
    rule: str = ""
    """Requirement of the column, after "must"."""

    @property
    def must(self) -> str:
        return f"`{self.column}` must {self.rule}: {self.reason}"


Schedule = Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"]
"""The order of forwards and backwards in a pipeline; `pipeline/schedules.py` has torch's names."""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """The cuts of a model along the pipeline axis, and the order in which its pieces run."""

    schedule: Schedule
    chunks: int
    """Pieces of the model on each rank of the axis."""
    split: Literal["layers", "cost"]
    weight_grads: Literal["queue", "autograd"]


@dataclass(frozen=True, slots=True)
class ResolvedRule:
    """A rule that is ready to match; rules are ordered."""

    kind: Literal["glob", "class", "glob+class", "substring"]
    pattern: str
    """Glob or substring on the name; `""` for a pure class rule."""
    klass: str
    """Dotted class, `""` for a pure name rule."""
    sets: tuple[tuple[str, str], ...]
    """(column or `reduce.wire`, ...; value) pairs, in the order of COLUMNS."""
    pin: bool
    output: Output | None
    why: str
    """Key and pattern for reports, such as `precision.rules[1]: '*.router.*'`."""


@dataclass(frozen=True, slots=True)
class LossScale:
    dynamic: bool
    initial: float
    window: int
    hysteresis: int
    consecutive: bool
    minimum: float


@dataclass(frozen=True, slots=True)
class Batch:
    """The three batch numbers. `micro` and `train` are 0 if the caller's loader decides them."""

    micro: int
    """Samples per forward on one rank."""
    accumulation: int
    train: int
    """Samples per optimizer step over all ranks."""


@dataclass(frozen=True, slots=True)
class Averaging:
    """The division that turns a sum over ranks into a gradient."""

    mean: bool
    before: float
    """Divisor before the reduction; the rest of the division follows the reduction."""


@dataclass(frozen=True, slots=True)
class ShardingPolicy:
    """The sharding of parameters over ranks and the lifetime of their copies."""

    stage: Literal[0, 1, 2, 3]
    units: tuple[str, ...]
    """Globs on module paths; empty finds the blocks by name."""
    keep_gathered: Literal["never", "micro-batch", "step"]
    free_accumulator: bool
    offload: bool
    prefetch: int = field(default=0, metadata={"omitted": True})
    """Bytes for the unit that runs and those gathered ahead; 0 is the largest two neighbours."""


@dataclass(frozen=True, slots=True)
class ComponentSpec:
    """An optimizer or a schedule to build: its type and arguments as JSON text, so that it can be hashed."""

    type: str
    params: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The meaning of a config on a mesh: nothing is left open, and every decision has its reason."""

    mode: Mode
    backend: BackendName
    demands: tuple[tuple[str, str, str], ...]
    """(column, value, why): the columns that the config sets for every parameter."""
    rules: tuple[ResolvedRule, ...]
    safe: tuple[str, ...]
    """Autocast only: classes whose parameters travel in the low dtype."""
    buffers: DType | None
    """Cast floating buffers to this; None keeps them."""
    buffers_why: str
    allow_narrow: bool
    sharding: ShardingPolicy
    batch: Batch
    averaging: Averaging
    clip: float
    """Global norm to clip to; 0 is off."""
    loss_scale: LossScale | None
    skip_nonfinite: bool
    """Skip the step when a gradient is not finite, instead of raising."""
    optimizer: ComponentSpec | None
    schedule: ComponentSpec | None
    statistics: bool
    """Record statistics of every update."""
    print_every: int
    decisions: tuple[Decision, ...]
    """Every choice that is not a column, with its reason."""
    ignored: tuple[tuple[str, str], ...]
    """(key, reason): written keys that do nothing here."""
    used: tuple[str, ...]
    """Written keys that decided something."""
    experts: tuple[str, ...] = field(default=(), metadata={"omitted": True})
    """Globs on parameters that are divided over the expert axis; empty without such an axis."""
    pipeline: Pipelining | None = field(default=None, metadata={"omitted": True})
    """None without a pipeline."""
    requires_tree: bool = field(default=False, metadata={"omitted": True})
    """Whether `order: tree` is written, so that what would change the bits of the tree is refused. The
    default adds by the tree too, and refuses nothing for it."""

    @property
    def tree(self) -> bool:
        """Whether gradients are summed by the tree over micro-batches."""
        return any(column == "reduce.order" and value == "tree" for column, value, _ in self.demands)


def uses_muon(policy: Policy) -> bool:
    """Return True if the optimizer is Muon, which leaves some parameters to AdamW."""
    return policy.optimizer is not None and of_type(policy.optimizer.type).matrices
