"""The decisions that are not a column: mode, batch, sharding, averaging, loss scale, optimizer, schedule.

Each function reads its keys and returns the decided value, with the decisions that a plan prints.
`columns.py` decides the dtypes of a parameter, and `support.py` knows which combinations are supported.

The rule for the mode is the table of flags in `docs/config.md`; a test checks every row. No other
file reads `bf16.enabled`, `fp16.enabled` or `torch_autocast.enabled`.

Invariant: every function is pure and total; contradictions go to `problems` and nothing raises. The mode
depends on the written flags only, never on a device, a backend or a model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

from zerodrift.config import Config, TorchAutocast, shown
from zerodrift.dtypes import DType
from zerodrift.errors import Problems, did_you_mean
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import TORCH_OPTIMIZERS, TORCH_SCHEDULES, TYPES, of_type
from zerodrift.policy.arguments import ALIASES, SCHEDULES, AutoNumbers
from zerodrift.policy.backends import Backend
from zerodrift.policy.decisions import (
    Averaging,
    Batch,
    ComponentSpec,
    Decision,
    LossScale,
    Mode,
    ShardingPolicy,
)
from zerodrift.policy.parameters import MUON_RULE

Decisions = tuple[Decision, ...]

_DIVISORS = "`prescale_gradients`, `gradient_predivide_factor`"


def decide_sharding(
    config: Config, stage: int, backend: Backend, mesh: MeshShape, problems: Problems
) -> tuple[ShardingPolicy, Decisions]:
    zero, block = config.zero_optimization, config.sharding
    keep, why = block.keep_gathered, "`sharding.keep_gathered`"
    if keep is None and stage in backend.gathered_once:
        first, last = backend.gathered_once[0], backend.gathered_once[-1]
        keep, why = "step", f"backend {backend.name}: stages {first}-{last} gather once per step"
    elif keep is None and config.pipeline is not None and config.pipeline.stages > 1:
        keep, why = "step", "a pipeline uses every unit once per micro-batch: gathered once per step"
    elif keep is None:
        keep, why = "never", "default: a gathered unit is dropped after use, two are alive at once"
    stage_why = "default: nothing is sharded" if zero.stage is None else "`zero_optimization.stage`"
    decisions = [Decision("stage", str(stage), stage_why)]
    if stage == 3 or backend.storage_sharded:
        decisions.append(Decision("keep_gathered", keep, why))
    if block.prefetch is not None and stage == 3:
        decisions.append(Decision("prefetch", f"{block.prefetch:,} bytes", "`sharding.prefetch`"))
    decisions += _secondary(config, stage, backend, keep, mesh, problems)
    free = block.accumulator != "keep"
    why = "`sharding.accumulator`" if block.accumulator else "default: memory goes back to activations"
    decisions.append(Decision("accumulator", "freed after the step" if free else "kept between steps", why))
    offload, key = bool(zero.cpu_offload), "zero_optimization.cpu_offload"
    if zero.offload_optimizer is not None:
        if offload:
            must = "must be left out with `offload_optimizer`, which it is the older spelling of"
            problems.add(key, must, got=True, do="Keep `offload_optimizer`.")
        offload, key = zero.offload_optimizer.device == "cpu", "zero_optimization.offload_optimizer.device"
    if offload:
        why = f"`{key}`: in host memory; the bill counts them too"
        decisions.append(Decision("offload", "master and state", why))
    units = tuple(block.units or ())
    policy = ShardingPolicy(stage, units, keep, free, offload, block.prefetch or 0)  # type: ignore[arg-type]
    return policy, tuple(decisions)


SECONDARY = "sharding.secondary"
HPZ = "zero_optimization.zero_hpz_partition_size"


def secondary_of(config: Config) -> tuple[str, int]:
    """Return the key that asks for a second copy of the blocks, and over how many ranks: 1 for none."""
    own, theirs = config.sharding.secondary, config.zero_optimization.zero_hpz_partition_size
    return (HPZ, theirs or 1) if own is None else (SECONDARY, own)


def _secondary(
    config: Config, stage: int, backend: Backend, keep: str, mesh: MeshShape, problems: Problems
) -> Iterator[Decision]:
    key, ranks = secondary_of(config)
    theirs = config.zero_optimization.zero_hpz_partition_size or 1
    if key == SECONDARY and theirs not in (1, ranks):
        problems.add(key, f"must agree with `{HPZ}`, which says {theirs}", got=ranks, do="Keep one of them.")
    if ranks == 1:
        return
    if stage < 3:
        yield Decision("secondary", "none", f"`{key}`: only stage 3 gathers the blocks")
    elif keep != "never":
        must = "must be left out where blocks stay gathered until their backward (`sharding.keep_gathered`)"
        problems.add(key, must, got=ranks, do="Leave one of the two out; a pipeline always keeps them.")
    elif not backend.regathers:
        must = f"must be left out on backend {backend.name}, which gathers over all ranks"
        problems.add(key, must, got=ranks, do="Leave it out, or use the native backend.")
    elif mesh.secondary == 1:
        why = f"`{key}`: the shards are on no more than {_count(mesh.shard, 'rank')}"
        yield Decision("secondary", "none", why)
    else:
        text = f"second copy of the blocks over {mesh.secondary} of {mesh.shard} ranks"
        if mesh.expert > 1:
            over = mesh.expert_secondary
            text += f", of experts over {over}" if 1 < over < mesh.expert_shard else ", not of experts"
        yield Decision("secondary", text, f"`{key}`: gathers of a backward stay among them")


def decide_averaging(config: Config, mesh: MeshShape, problems: Problems) -> tuple[Averaging, Decision]:
    mean, prescaled = config.gradient_allreduce_op != "sum", bool(config.prescale_gradients)
    factor = config.gradient_predivide_factor or 1.0
    if not mean and (prescaled or factor != 1.0):
        must = f"must be `mean` where gradients are divided ({_DIVISORS})"
        problems.add("gradient_allreduce_op", must, got="sum", do="Remove one of the keys.")
    if prescaled and factor != 1.0:
        must = "must be left out with `prescale_gradients: true`, which divides by all ranks before"
        problems.add("gradient_predivide_factor", must, got=factor, do="Keep one of the two keys.")
    before, why = float(factor), "`gradient_allreduce_op`" if config.gradient_allreduce_op else "default"
    if prescaled:
        before, why = float(mesh.data), "`prescale_gradients`"
    elif before != 1.0:
        why = "`gradient_predivide_factor`"
    text = f"mean over {_count(mesh.data, 'rank')}, divided "
    text += "after the sum" if before == 1.0 else f"by {before:g} before the sum"
    return Averaging(mean, before), Decision("averaging", text if mean else "sum over ranks", why)


def decide_loss_scale(config: Config, mode: Mode, numbers: AutoNumbers) -> tuple[LossScale | None, Decision]:
    if not mode.scaled:
        return None, Decision("loss scale", "none", f"mode {mode} has the range of fp32")
    block = config.fp16
    get = (lambda name: getattr(block, name)) if block else (lambda name: None)
    static = get("loss_scale") or 0.0
    power = numbers.number("fp16.initial_scale_power", get("initial_scale_power"), 16)
    scale = LossScale(
        dynamic=not static,
        initial=float(static) if static else 2.0 ** int(power),
        window=int(numbers.number("fp16.loss_scale_window", get("loss_scale_window"), 1000)),
        hysteresis=int(numbers.number("fp16.hysteresis", get("hysteresis"), 2)),
        consecutive=bool(get("consecutive_hysteresis")),
        minimum=numbers.number("fp16.min_loss_scale", get("min_loss_scale"), 1.0),
    )
    if static:
        return scale, Decision("loss scale", f"static {scale.initial:g}", "`fp16.loss_scale`")
    text = f"dynamic from {scale.initial:g}, window {scale.window}, hysteresis {scale.hysteresis}"
    return scale, Decision("loss scale", text, "`fp16` block" if block else f"mode {mode}, default scaler")


def decide_optimizer(
    config: Config, numbers: AutoNumbers, problems: Problems
) -> tuple[ComponentSpec | None, Decisions]:
    """Return the optimizer of a config, and the decisions on unusual updates: Muon's parts, statistics."""
    block, spec = config.optimizer, None
    decisions = []
    kind = None if block is None else TYPES.get(block.type.lower())
    if block is not None and kind is None:
        other = "Any other elementwise optimizer: build it and pass it to `initialize`, in Python."
        _refuse_type("optimizer", block.type, TYPES.values(), TORCH_OPTIMIZERS, other, problems)
    elif block is not None and kind is not None:
        spec = ComponentSpec(kind, numbers.params("optimizer.params", kind, block.params))
        rest = of_type(kind).rest
        if rest is not None:
            why = f"`optimizer.type`; rule: {MUON_RULE}; or `precision.rules[].optimizer`"
            decisions.append(Decision("optimizer", f"{of_type(kind).name}, {rest.name} for the rest", why))
    if config.precision.statistics:
        decisions.append(Decision("statistics", "of every update", "`precision.statistics`"))
    return spec, tuple(decisions)


def _refuse_type(
    block: str, kind: str, own: Iterable[str], only_torch: Collection[str], other: str, problems: Problems
) -> None:
    """Refuse the type of a block. The drop-in builds classes that only torch has by itself."""
    must = f"must be one of {', '.join(dict.fromkeys(own))}"
    if kind in only_torch:
        do = "Build it and pass it to `initialize`; for a DeepSpeed script `zerodrift run` builds it."
    else:
        module = "torch.optim.lr_scheduler" if block == "scheduler" else "torch.optim"
        must += f", or a class of {module} in a script of `zerodrift run`"
        do = did_you_mean(kind, (*own, *only_torch)) or other
    problems.add(f"{block}.type", must, got=shown(kind), do=do)


FINAL_RATES = {
    "polynomial": ("lr_end", 1e-7),
    "cosine_with_min_lr": ("min_lr", 0.0),
    "cosine_warmup_with_min_lr": ("min_lr", 0.0),
}
"""Schedule -> the argument that is its final rate, and the default of that."""


def decide_schedule(
    config: Config, numbers: AutoNumbers, optimizer: ComponentSpec | None, problems: Problems
) -> ComponentSpec | None:
    if config.scheduler is None:
        return None
    kind = ALIASES.get(config.scheduler.type, config.scheduler.type)
    if kind not in SCHEDULES:
        other = "Any torch scheduler: build it and pass it to `initialize`, in Python."
        _refuse_type("scheduler", kind, SCHEDULES, TORCH_SCHEDULES, other, problems)
        return None
    params = numbers.params("scheduler.params", kind, config.scheduler.params)
    own = None if optimizer is None else json.loads(optimizer.params).get("lr")
    if own is not None and kind in FINAL_RATES:
        name, default = FINAL_RATES[kind]
        final = json.loads(params).get(name, default)
        if final and own <= final:
            must = "must be below the rate of the optimizer, `optimizer.params.lr`"
            problems.add(f"scheduler.params.{name}", must, got=f"{final}, where that is {own}")
    return ComponentSpec(kind, params)


EXPERTS = ("*.experts.*",)


def decide_experts(
    config: Config, mesh: MeshShape, averaging: Averaging, problems: Problems
) -> tuple[tuple[str, ...], Decisions]:
    """Return the globs of parameters that are divided over the expert axis; none without such an axis."""
    if mesh.expert == 1:
        return (), ()
    if averaging.before != 1.0:
        when = f"where gradients are divided before they are reduced ({_DIVISORS})"
        must = f"must be left out {when}: gradients of experts are reduced over fewer ranks"
        problems.add("experts.ranks", must, got=mesh.expert, do="Remove one of the keys.")
    written = config.experts.parameters if config.experts else None
    why = "`experts.parameters`" if written else "default: where transformers stacks experts"
    globs = tuple(written or EXPERTS)
    value = f"{', '.join(globs)} over {mesh.expert} ranks, sharded over {mesh.expert_shard}"
    return globs, (Decision("experts", value, f"`experts.ranks`; {why}"),)


TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


def decide_batch(
    train: int | None, micro: int | None, steps: int | None, mesh: MeshShape, problems: Problems
) -> tuple[Batch, Decision]:
    """Return the three batch numbers, and the reason for the numbers that were not written.

    DeepSpeed's arithmetic: train = micro x accumulation x data-parallel ranks. Any two give the third. With
    only `train` or only `micro` the accumulation is 1. A caller with its own loader may write none.
    """
    ranks = mesh.data
    over = _count(ranks, "rank")

    def quotient(parts: int) -> int:
        assert train is not None
        if train % parts:
            below, above = train // parts * parts, (train // parts + 1) * parts
            must = f"must be a multiple of {parts} (data-parallel ranks times micro-batches or samples)"
            do = f"Use {below} or {above}." if below else f"Use {above}, or fewer ranks."
            problems.add(TRAIN, must, got=train, do=do)
        return max(1, train // parts)

    if train is None:
        steps = steps or 1
        why = "batch sizes are the caller's loader's" if micro is None else f"{MICRO} x {STEPS} x {over}"
        sizes = Batch(micro or 0, steps, (micro or 0) * steps * ranks)
    elif micro is None:
        why = f"{TRAIN} over {over}" if steps is None else f"{TRAIN} over {over} and {steps} micro-batches"
        sizes = Batch(quotient(ranks * (steps or 1)), steps or 1, train)
    elif steps is None:
        sizes, why = Batch(micro, quotient(ranks * micro), train), f"{TRAIN} over {over} of {micro}"
    else:
        sizes, why = Batch(micro, steps, train), "written in full"
        if train != micro * steps * ranks:
            product = f"{micro} x {steps} x {ranks} = {micro * steps * ranks}"
            must = f"must be {MICRO} x {STEPS} x data-parallel ranks, {product}"
            problems.add(TRAIN, must, got=train, do="Write two of the three; the third follows.")
    per_step = _count(sizes.accumulation, "micro-batch", "es")
    text = f"{sizes.micro} x {per_step} x {over} = {sizes.train}" if sizes.micro else f"{per_step} per step"
    return sizes, Decision("batch", text, why)


def _count(number: int, one: str, plural: str = "s") -> str:
    return f"{number} {one}{'' if number == 1 else plural}"


# --- the mode --------------------------------------------------------------------------------------------


Flag = bool | Literal["auto"] | None
"""A key as it is written; None is absent."""


def from_flags(bf16: Flag, fp16: Flag, asks: bool) -> tuple[Mode | None, str]:
    """Return the mode and its reason; None if both are true. `asks`: `precision.mode` is `auto`."""
    if bf16 is fp16 is True:
        return None, "both `bf16.enabled` and `fp16.enabled` are true"
    if bf16 is True:
        return Mode.BF16, "`bf16.enabled` is true"
    if fp16 is True:
        return Mode.FP16, "`fp16.enabled` is true"
    asked = [name for name, on in (("bf16.enabled", bf16), ("fp16.enabled", fp16)) if on == "auto"]
    asked += ["precision.mode"] if asks else []
    if not asked:
        return Mode.FP32, "nothing asks for mixed precision"
    auto = " and ".join(f"`{key}`" for key in asked) + (" is auto" if len(asked) == 1 else " are auto")
    if bf16 is False:
        return Mode.FP32, f"{auto}, but `bf16.enabled` is false, and fp16 is never chosen by itself"
    return Mode.BF16, f"{auto} and bf16 is not ruled out"


def decide_mode(config: Config, problems: Problems) -> Decision:
    """Decide the mode of a config, with its reason; contradictions go to `problems`."""
    bf16 = config.bf16.enabled if config.bf16 else None
    fp16 = config.fp16.enabled if config.fp16 else None
    written = config.precision.mode
    autocast = config.torch_autocast
    if autocast is not None and autocast.enabled:
        return _autocast(config, autocast, bf16, fp16, problems)
    if written is None or written == "auto":
        mode, why = from_flags(bf16, fp16, asks=written == "auto")
        if mode is None:
            must = "must not be true together with `fp16.enabled`"
            problems.add("bf16.enabled", must, got="both", do="Keep one of the two.")
            mode = Mode.BF16
        return Decision("precision.mode", str(mode), why)
    mode = Mode(written)
    must = f"must agree with `precision.mode`, which is {mode}"
    for key, state, own in (("bf16.enabled", bf16, Mode.BF16), ("fp16.enabled", fp16, Mode.FP16)):
        if state is (mode is not own):
            problems.add(key, must, got=shown(state), do=f"Remove `{key}` or `precision.mode`.")
    if mode.autocast and autocast is not None:
        do = "Remove one of the two keys."
        if autocast.enabled is False:
            problems.add("torch_autocast.enabled", must, got="false", do=do)
        if autocast.dtype not in (None, mode.dtype):
            problems.add("torch_autocast.dtype", must, got=autocast.dtype, do=do)
    return Decision("precision.mode", str(mode), "`precision.mode`")


def _autocast(config: Config, block: TorchAutocast, bf16: Flag, fp16: Flag, problems: Problems) -> Decision:
    dtype = block.dtype or DType.BF16
    why = "`torch_autocast.enabled` is true"
    if block.dtype is None:
        why += "; its `dtype` is not given: bf16, which needs no loss scale"
    if dtype is DType.FP32:
        do = "For fp32, turn autocast off."
        problems.add("torch_autocast.dtype", "must be bf16 or fp16", got="fp32", do=do)
        dtype = DType.BF16
    mode = Mode(f"autocast-{dtype}")
    written = config.precision.mode
    if written not in (None, "auto", mode.value):
        must = f"must agree with `torch_autocast`, which says {mode}"
        do = "Remove `precision.mode` or the `torch_autocast` block."
        problems.add("precision.mode", must, got=written, do=do)
    for key, state, own in (("bf16", bf16, DType.BF16), ("fp16", fp16, DType.FP16)):
        if state is not True:
            continue
        if has_flag(config, f"{key}_master_weights_and_grads") and own is dtype:
            why += f"; `{key}.enabled` only sets the dtype of parameters, masters and accumulator"
            continue
        must = "must not be true together with `torch_autocast.enabled`"
        do = (
            f"Autocast keeps parameters in fp32: set `{key}.enabled` to false. Only with "
            f"`{key}.{key}_master_weights_and_grads: true` and the same autocast dtype may both be on: "
            f"then the flag sets the dtype of parameters, masters and accumulator."
        )
        problems.add(f"{key}.enabled", must, got="both", do=do)
    return Decision("precision.mode", str(mode), why)


FLAGS = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
"""Flags by which the blocks `bf16` and `fp16` change columns."""


def has_flag(config: Config, flag: str) -> bool | None:
    """Return whether one of `FLAGS` has an effect: True if its block is on, None if it is not true."""
    name = flag.partition("_")[0]
    block = getattr(config, name, None)
    if block is None or not getattr(block, flag, None):
        return None
    if block.enabled in (True, False):
        return block.enabled is True
    return config.precision.mode == name
