"""Every key that zerodrift uses, ours and DeepSpeed's, as typed blocks.

The blocks are public: `zerodrift.Config(precision=zerodrift.Precision(mode="bf16"))` is the same as the dict
or file with those keys, and both forms mix. A constructor refuses what `load` refuses, in the same words.
A DeepSpeed key without a field here is in the table of `config/deepspeed.py`. `policy` resolves the values.

Invariant: `None` means "not written" and "auto" means that the user wrote "auto". No other default
appears here, so that `policy` can tell a written value from a default.

The docstrings under the fields are the configuration reference: the docs are generated from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from zerodrift.config.fields import ColumnDType, Items
from zerodrift.config.plain_tree import Tree
from zerodrift.config.tree import Block, KeyUse
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.mesh import MOST_RANKS
from zerodrift.optimizers import TYPES, either

Auto = Literal["auto"]
DTypeName = Literal["fp32", "bf16", "fp16"]
"""The dtypes that an editor offers. A key accepts every spelling of the dtypes in `dtypes.ADMITTED`."""
DTypeKey = DType | DTypeName
GatherKey = DTypeKey | Literal["fp8", "mxfp8", "int8"]
WireKey = GatherKey | Literal["int4", "e5m2-128", "int4-64-bf16"]
ExportKey = DTypeKey | Literal["fp8-128x128", "fp8-row", "int8-row", "nf4"]
FrozenKey = DType | Literal["nf4", "int8", "fp8", "mxfp8", "int4", "mxfp4", "nf4-64-bf16", "int4-64-bf16"]


def _integer(value: Any) -> Any:
    """Convert a float without a fraction, since published configs write whole numbers as `2e3`."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _never(value: Any) -> Any:
    """Convert infinity, by which accelerate silences the log, to the interval `0`: never."""
    return 0 if isinstance(value, float) and value == math.inf else value


Storage = Annotated[DTypeKey | FrozenKey, ColumnDType("storage")]
Frozen = Annotated[FrozenKey, ColumnDType("frozen")]
Gather = Annotated[GatherKey, ColumnDType("gather")]
Compute = Annotated[DTypeKey, ColumnDType("compute")]
Product = Annotated[DTypeKey | Literal["fp8"], ColumnDType("compute.product")]
Grad = Annotated[DTypeKey, ColumnDType("grad")]
Accumulate = Annotated[DTypeKey, ColumnDType("accumulate")]
Wire = Annotated[WireKey, ColumnDType("reduce.wire")]
Sum = Annotated[DTypeKey, ColumnDType("reduce.sum")]
Export = Annotated[ExportKey, ColumnDType("export")]
Buffers = Annotated[DTypeKey, ColumnDType("buffers")]
Pin = Annotated[Literal[DType.FP32, "fp32"], ColumnDType("storage", DType.FP32)]
Flag = Annotated[bool, Field(strict=True)]
MOST = 2**31 - 1
"""Most micro-batches or steps. A larger number is a mistake, or means no bound at all."""

Positive = Annotated[int, Field(gt=0, le=MOST, strict=True), BeforeValidator(_integer)]
Samples = Annotated[int, Field(gt=0, strict=True), BeforeValidator(_integer)]
Ranks = Annotated[int, Field(gt=0, le=MOST_RANKS, strict=True), BeforeValidator(_integer)]
Natural = Annotated[int, Field(ge=0, strict=True), BeforeValidator(_integer)]
NonNegativeFloat = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
Scale = Annotated[float, Field(ge=0, le=2.0**127, strict=True, allow_inf_nan=False)]
"""A loss scale, bounded by the range of fp32, in which a loss is scaled."""

RULES = "precision.rules"
BackendName = Literal["native", "fsdp2"]
Mode = Literal["auto", "fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16"]


class Reduce(Block):
    """The `reduce` column in full; a bare dtype means both `wire` and, if it is fp32, `sum`."""

    wire: Wire | None = None
    """Dtype of the gradient on the wire."""
    sum: Sum | None = None
    """Dtype in which the gradients of all ranks are summed. Default `fp32`."""
    when: Literal["last", "every"] | None = None
    """Reduce after the `last` micro-batch or `every` one. Default `last` at stages 0-1, `every` at 2-3."""
    order: Literal["auto", "rank", "tree", "native"] | None = None
    """Order of the sum, the same for all parameters. `tree`: one tree over the micro-batches of a step, with
    the same bits on any number of ranks; refuses what would change them. `rank`: the order of ranks.
    `native`: NCCL's reduce-scatter, without a fixed order. `auto`, the default: the tree where it takes no
    more memory, else the order of ranks; the plan says which."""
    feedback: Flag | None = None
    """Narrow wires only: add a rank's rounding error to its next gradient. Takes an fp32 value for
    each element on every rank. Default false."""
    rounding: Literal["nearest", "stochastic"] | None = None
    """Narrow wires only: round to the nearest code, or up or down at random so that the mean is kept. The
    random bits depend on parameter, element, step, micro-batch and rank alone. Default `nearest`."""


class MatrixProducts(Block):
    """The products of linear layers, one by one; a product that is left out is in the compute dtype."""

    forward: Product | None = None
    """The output: input and weight. `fp8`, or the compute dtype."""
    grad_input: Product | None = None
    """The input's gradient: the output's gradient and the weight."""
    grad_weight: Product | None = None
    """The weight's gradient: the output's gradient and the input."""
    pad: Flag | None = None
    """Let zeros fill up weights whose sizes are no multiples of 16, where a device needs that. Default
    false: such a weight is refused."""


class ColumnKeys(Block):
    """The columns of a parameter: of every parameter in `precision`, of the matching ones in a rule."""

    storage: Storage | None = None
    """The parameter at rest between steps. A narrow format is for frozen parameters."""
    gather: Gather | None = None
    """The parameter on the wire."""
    compute: Compute | Literal["fp8", "fp8-hp-grad-weight"] | MatrixProducts | None = None
    """The parameter in the module's arithmetic. `fp8` sets the three products of a linear layer,
    `fp8-hp-grad-weight` all but that for the weight's gradient, a block each of them; the values themselves
    then keep the mode's dtype."""
    grad: Grad | None = None
    """The gradient as autograd leaves it; equals `compute`."""
    accumulate: Accumulate | None = None
    """The sum over micro-batches. Default fp32. Same as `gradient_accumulation_dtype`."""
    reduce: Wire | Reduce | None = None
    """The gradient on the wire: a dtype, or `{wire, sum, when, order}`."""
    master: Literal["fp32", "split", "same"] | None = None
    """The weights that the optimizer updates: `fp32` (a copy), `split` (exact fp32: bf16 + 16 bits), `same`
    (storage)."""
    state: Literal["fp32", "bf16", "bf16-stochastic", "8bit"] | None = None
    """The optimizer's moments, and how they are rounded."""
    export: Export | None = None
    """The parameter in a saved model file. A narrow format is for linear layers; embeddings, heads, norms and
    routers keep theirs."""


class Rule(ColumnKeys):
    """One ordered rule: which parameters, and what their columns are. The last match wins, cell by cell."""

    match: str | None = None
    """Glob on the full parameter name; `*` also matches dots: `*.router.*`."""
    class_: str | None = Field(default=None, validation_alias="class")
    """Dotted name of a module class; matches the parameters such a module owns itself."""
    pin: Pin | None = None
    """Shorthand: fp32 in every column. A pinned parameter is never rounded anywhere."""
    placement: Literal["sliced", "matrices", "whole"] | None = None
    """Boundaries of a rank's slice: `sliced`, anywhere in the parameter; `matrices`, between the matrices of
    its last two dimensions; `whole`, not inside it. For optimizers that work on matrices; costs padding."""
    optimizer: Literal["Muon", "AdamW"] | None = None
    """Only for `optimizer.type: Muon`: the update to use instead of the one that the stated rule chooses."""
    output: Literal["keep", "input"] | None = None
    """Dtype of a fully pinned module's output: the module's own (`keep`) or that of its input (`input`)."""

    @classmethod
    def check(cls, written: Tree, where: str, problems: Problems) -> None:
        """Check that a rule selects parameters and sets something."""
        subjects = {"match", "class"}
        if not any(map(written.get, subjects)):  # an empty text would match everything
            problems.add(where, "must say which parameters it is for", got="neither `match` nor `class`")
        if not written.keys() - subjects:
            must = "must set something: a column, `pin` or `output`"
            problems.add(where, must, got="nothing", do="As in `pin: fp32`.")


class Precision(ColumnKeys):
    """Every precision decision. One key per column sets the default; `rules` refine it by name or class."""

    mode: Mode | None = None
    """The recipe that the columns start from; `auto` follows the stated rule of `docs/config.md`."""
    buffers: Buffers | Literal["keep"] | None = None
    """Floating buffers: `keep` them as they are, or cast them. Same as `data_types.buffer_dtype`."""
    allow_narrow: Flag | None = None
    """Allow `accumulate` to be narrower than `compute`."""
    frozen: Frozen | None = None
    """The `storage` of frozen linear layers, in a narrow format: the base of adapters. Embeddings, heads,
    norms, routers and biases keep theirs, unless a rule says otherwise."""
    statistics: Flag | None = None
    """Record how every update is rounded, for `engine.update_statistics()`. Default false."""
    rules: Items[Rule] = ()
    """Ordered rules; the last match wins, cell by cell."""


class Sharding(Block):
    """How parameters are spread over ranks; `zero_optimization.stage` sets the stage."""

    replicate: Ranks | None = None
    """Hybrid sharding: how many copies of the model; each is sharded over world size / replicate ranks."""
    units: Items[str] | None = None
    """Globs on module paths that are gathered together; by default the transformer blocks are found."""
    keep_gathered: Literal["never", "micro-batch", "step"] | None = None
    """Stage 3: how long a gathered unit lives. `never` regathers in backward, `micro-batch` keeps it from
    forward to backward, `step` keeps it for all micro-batches of a step."""
    prefetch: Positive | None = None
    """Stage 3: most bytes of the running unit and the units gathered ahead of it; one is always gathered
    ahead. Default: the bytes of the largest two neighbours, which the peak holds in any case."""
    secondary: Ranks | None = None
    """Stage 3: number of neighbouring ranks, such as those of one node, that share a second copy of the
    blocks. A backward gathers from it, so only forwards gather over all ranks. ZeRO++ calls it hpZ."""
    accumulator: Literal["free", "keep"] | None = None
    """Whether the accumulator's memory is freed between steps (`free`) or kept (`keep`)."""


class Pipeline(Block):
    """Pipeline parallelism."""

    stages: Ranks
    """Number of pipeline stages, one per rank; 1 means no pipeline."""
    schedule: (
        Literal["gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"] | None
    ) = None
    """The order of forwards and backwards: a schedule of `torch.distributed.pipelining`. Default `1f1b`, and
    `gpipe` with fewer micro-batches than stages."""
    micro_batches: Positive | None = None
    """Micro-batches per optimizer step: another name for `gradient_accumulation_steps`."""
    chunks: Annotated[Positive, Field(le=1024)] | None = None
    """Pieces of the model on each rank, for the schedules that interleave several. Default 2 for those, 1 for
    `gpipe` and `1f1b`."""
    split: Literal["layers", "cost"] | None = None
    """Balance the pieces by the number of `layers`, or by the `cost` of their matrix products. Default
    `layers`."""
    weight_grads: Literal["queue", "autograd"] | None = None
    """How deferred weight gradients (`interleaved-zero-bubble`, `zbv` and `dualpipev`) are computed: from
    zerodrift's `queue`, in the accumulate dtype, or by torch's second `autograd` pass. Default `queue`, and
    `autograd` with `precision.reduce.order: tree`."""


class Experts(Block):
    """Expert parallelism: ranks of a shard group hold different experts, to which tokens travel."""

    ranks: Ranks
    """Number of ranks that share the experts of a layer; must divide the ranks of a shard group. 1 turns
    expert parallelism off."""
    parameters: Items[str] | None = None
    """Globs on the names of parameters that stack one expert after the other in their first dimension.
    Default `*.experts.*`."""


class Bf16(Block):
    """DeepSpeed's `bf16` block."""

    enabled: Flag | Auto | None = None
    """Compute in bf16."""
    bf16_master_weights_and_grads: Flag | None = None
    """Master and accumulator in bf16: `master: same`, `accumulate: bf16`."""
    bf16_optimizer_states: Flag | None = None
    """Moments in bf16, rounded stochastically: `state: bf16-stochastic`."""
    check_grad_overflow: Flag | None = None
    """Skip the step if a gradient is not finite; here at every stage. Default true."""


class Fp16(Block):
    """DeepSpeed's `fp16` block: the mode and the loss scale, which also serves fp16 autocast."""

    enabled: Flag | Auto | None = None
    """Compute in fp16 with a loss scale."""
    auto_cast: Flag | None = None
    """Cast the model's floating inputs to fp16. The engine always casts, at either value."""
    loss_scale: Scale | None = None
    """0 means a dynamic scale; any other value is a static one."""
    initial_scale_power: Annotated[Natural, Field(le=120)] | Auto | None = None
    """The dynamic scale starts at 2 to this power. Default 16."""
    loss_scale_window: Positive | Auto | None = None
    """Steps without overflow before the scale doubles. Default 1000."""
    hysteresis: Positive | Auto | None = None
    """Overflows before the scale halves. Default 2."""
    consecutive_hysteresis: Flag | None = None
    """Refill the hysteresis after every step without overflow. Default false."""
    min_loss_scale: PositiveFloat | Auto | None = None
    """The dynamic scale never goes below this; an overflow at the minimum is an error. Default 1."""
    fp16_master_weights_and_grads: Flag | None = None
    """Master and accumulator in fp16: `master: same`, `accumulate: fp16`."""


class TorchAutocast(Block):
    """DeepSpeed's `torch_autocast` block."""

    enabled: Flag | None = None
    """Run the forward under `torch.autocast`; parameters are stored in fp32."""
    dtype: Compute | None = None
    """The autocast dtype: bf16 or fp16. Default bf16."""
    lower_precision_safe_modules: Items[str] | None = None
    """Dotted classes whose parameters are sent in the autocast dtype. Default Linear and Conv1d to Conv3d."""


class DataTypes(Block):
    """DeepSpeed's `data_types` block."""

    grad_accum_dtype: Accumulate | None = None
    """Same as `gradient_accumulation_dtype`."""
    param_dtype: Buffers | None = None
    """Must agree with the mode: this is a check, not a setting."""
    buffer_dtype: Buffers | None = None
    """Cast floating buffers to this dtype. By default they are kept as they are."""


class OffloadOptimizer(Block):
    """DeepSpeed's `offload_optimizer` block."""

    device: Literal["none", "cpu"] | None = None
    """`cpu` keeps master and state in host memory and updates there."""


class ZeroOptimization(Block):
    """DeepSpeed's `zero_optimization` block, as far as it decides anything here."""

    stage: Annotated[Natural, Field(le=3)] | None = None
    """0 whole, 1 shards master and state, 2 also the accumulator, 3 also storage."""
    fp32_pinned_parameters: Items[str] | None = None
    """Substrings of parameter names that stay fp32 in every column."""
    mics_shard_size: (
        Annotated[int, Field(ge=-1, le=MOST_RANKS, strict=True), BeforeValidator(_integer)] | None
    ) = None
    """Hybrid sharding: ranks per shard group; -1 is all of them."""
    offload_optimizer: OffloadOptimizer | None = None
    """Master and state in host memory."""
    cpu_offload: Flag | None = None
    """DeepSpeed's older spelling of `offload_optimizer: {device: cpu}`, which it must not come with."""
    zero_quantized_weights: Flag | None = None
    """ZeRO++: gather trained weights in int8."""
    zero_quantized_nontrainable_weights: Flag | None = None
    """ZeRO++: keep and gather frozen linear layers in int8."""
    zero_quantized_gradients: Flag | None = None
    """ZeRO++: send gradients in int4."""
    zero_hpz_partition_size: Annotated[Natural, Field(le=MOST_RANKS)] | None = None
    """ZeRO++: DeepSpeed's name for `sharding.secondary`."""
    load_from_fp32_weights: Literal[True] | None = None
    """Take masters from the model's own fp32 values. This is always done; false is refused."""


class Optimizer(Block):
    """DeepSpeed's `optimizer` block."""

    type: str = Field(description=f"{either(list(dict.fromkeys(TYPES.values())))}.")
    params: dict[str, Any] = Field(default_factory=dict)
    """The optimizer's arguments. Those left out have DeepSpeed's defaults: no `weight_decay`, `lr` 1e-3."""


class Scheduler(Block):
    """DeepSpeed's `scheduler` block, which takes the schedules of `transformers` too."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest, as DeepSpeed has them; or, if
    `transformers` is installed, one of its own: linear, cosine, cosine_with_restarts, cosine_with_min_lr,
    cosine_warmup_with_min_lr, polynomial, constant, constant_with_warmup, inverse_sqrt, and
    warmup_stable_decay or wsd."""
    params: dict[str, Any] = Field(default_factory=dict)
    """The schedule's arguments."""


class Config(Block):
    """A training config, checked for types but not yet resolved.

    A block may be given as its object or as a dict. Keys of DeepSpeed that decide nothing here have no field:
    a dict or a file may hold them, and they are listed as ignored."""

    precision: Precision = Precision()
    """Our precision block."""
    sharding: Sharding = Sharding()
    """Our sharding block."""
    pipeline: Pipeline | None = None
    """Our pipeline block."""
    experts: Experts | None = None
    """Our experts block."""
    backend: BackendName | None = None
    """Who executes the plan. Default native."""

    bf16: Bf16 | None = None
    """DeepSpeed's bf16 block."""
    fp16: Fp16 | None = None
    """DeepSpeed's fp16 block."""
    torch_autocast: TorchAutocast | None = None
    """DeepSpeed's autocast block."""
    gradient_accumulation_dtype: Accumulate | None = None
    """The sum over micro-batches, at every stage."""
    data_types: DataTypes | None = None
    """DeepSpeed's data_types block."""
    communication_data_type: Wire | None = None
    """Dtype of gradients on the wire, for every parameter that is not pinned."""
    zero_optimization: ZeroOptimization = ZeroOptimization()
    """DeepSpeed's sharding block."""

    gradient_clipping: NonNegativeFloat | Auto | None = None
    """Global L2 norm to clip to; 0 turns clipping off. Default 1.0, as in DeepSpeed."""
    prescale_gradients: Flag | None = None
    """Divide by the number of ranks before the reduction instead of after it."""
    gradient_predivide_factor: PositiveFloat | None = None
    """Divide by this before the reduction and by the rest of the number of ranks after it. Default 1."""
    gradient_allreduce_op: Literal["mean", "sum"] | None = None
    """Average gradients over ranks (`mean`) or only sum them."""

    train_batch_size: Samples | Auto | None = None
    """Samples per optimizer step, over all ranks."""
    train_micro_batch_size_per_gpu: Positive | Auto | None = None
    """Samples per forward on one rank."""
    gradient_accumulation_steps: Positive | Auto | None = None
    """Micro-batches per optimizer step."""

    optimizer: Optimizer | None = None
    """The optimizer to build when none is passed."""
    zero_allow_untested_optimizer: bool | None = None
    """Declare that a passed optimizer, unknown to zerodrift, is elementwise: an element's update depends on
    that element alone."""
    scheduler: Scheduler | None = None
    """The learning-rate schedule to build when none is passed."""
    steps_per_print: Annotated[Natural, BeforeValidator(_never)] | Auto | None = None
    """How many optimizer steps between lines printed by rank 0. Default 0, which prints none."""

    _keys: tuple[KeyUse, ...] = PrivateAttr(())

    @property
    def keys(self) -> tuple[KeyUse, ...]:
        """The use of every written key; empty before `load` has read the config."""
        return self._keys

    def with_keys(self, keys: Iterable[KeyUse]) -> Config:
        """Return a copy of the config with the uses of its keys, as `load` recorded them."""
        copy = self.model_copy()
        copy._keys = tuple(keys)
        return copy
