"""The decisions that are not a column: batch, sharding, clipping, averaging, loss scale, optimizer, schedule.

Each function reads its keys and returns the decided value with its reason. `columns.py` decides the dtypes of
a parameter, and `support.py` knows which combinations are supported.

Invariant: every function is pure and total; contradictions go to `problems` and nothing raises.
"""

from __future__ import annotations

import json

from zerodrift.config.plain_tree import shown
from zerodrift.config.schema import Config
from zerodrift.errors import Problems, did_you_mean
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import TYPES, of_type
from zerodrift.policy.arguments import ALIASES, SCHEDULES
from zerodrift.policy.backends import Backend
from zerodrift.policy.nouns import Averaging, Batch, ComponentSpec, Decision, LossScale, Mode, ShardingPolicy
from zerodrift.policy.numbers import AutoNumbers
from zerodrift.policy.parameters import MUON_RULE

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"

_DIVISORS = "`prescale_gradients`, `gradient_predivide_factor`"


def decide_sharding(
    config: Config, stage: int, backend: Backend
) -> tuple[ShardingPolicy, tuple[Decision, ...]]:
    zero, block = config.zero_optimization, config.sharding
    keep = block.keep_gathered
    pipeline = config.pipeline is not None and config.pipeline.stages > 1
    if keep is not None:
        kept_why = "`sharding.keep_gathered`"
    elif stage in backend.gathered_once:
        first, last = backend.gathered_once[0], backend.gathered_once[-1]
        keep, kept_why = "step", f"backend {backend.name}: stages {first}-{last} gather once per step"
    elif pipeline:
        keep, kept_why = "step", "a pipeline uses every unit once per micro-batch: gathered once per step"
    else:
        keep, kept_why = "never", "default: a gathered unit is dropped after use, two are alive at once"
    offload = zero.offload_optimizer is not None and zero.offload_optimizer.device == "cpu"
    free = block.accumulator != "keep"
    why = "default: nothing is sharded" if zero.stage is None else "`zero_optimization.stage`"
    decisions = [Decision("stage", str(stage), why)]
    if stage == 3 or backend.storage_sharded:
        decisions.append(Decision("keep_gathered", keep, kept_why))
    if block.prefetch is not None and stage == 3:
        decisions.append(Decision("prefetch", f"{block.prefetch:,} bytes", "`sharding.prefetch`"))
    why = "`sharding.accumulator`" if block.accumulator else "default: memory goes back to activations"
    decisions.append(Decision("accumulator", "freed after the step" if free else "kept between steps", why))
    if offload:
        why = "`zero_optimization.offload_optimizer.device`: in host memory; the bill counts them too"
        decisions.append(Decision("offload", "master and state", why))
    units = tuple(block.units or ())
    policy = ShardingPolicy(stage, units, keep, free, offload, block.prefetch or 0)  # type: ignore[arg-type]
    return policy, tuple(decisions)


def decide_clip(config: Config, numbers: AutoNumbers) -> tuple[float, str]:
    written = config.gradient_clipping
    clip = numbers.number("gradient_clipping", written, 1.0)
    if written is None:
        return clip, "default, as in DeepSpeed; 0 is off"
    return clip, "`gradient_clipping`"


def decide_averaging(config: Config, mesh: MeshShape, problems: Problems) -> tuple[Averaging, str]:
    mean = config.gradient_allreduce_op != "sum"
    factor = config.gradient_predivide_factor
    if not mean and (config.prescale_gradients or factor not in (None, 1.0)):
        must = f"must be `mean` where gradients are divided ({_DIVISORS})"
        problems.add("gradient_allreduce_op", must, got="sum", do="Remove one of the keys.")
    if config.prescale_gradients:
        if factor not in (None, 1.0):
            must = "must be left out with `prescale_gradients: true`, which divides by all ranks before"
            problems.add("gradient_predivide_factor", must, got=factor, do="Keep one of the two keys.")
        return Averaging(mean, float(mesh.data)), "`prescale_gradients`"
    if factor not in (None, 1.0):
        return Averaging(mean, float(factor or 1.0)), "`gradient_predivide_factor`"
    return Averaging(mean, 1.0), "`gradient_allreduce_op`" if config.gradient_allreduce_op else "default"


def decide_loss_scale(config: Config, mode: Mode, numbers: AutoNumbers) -> LossScale | None:
    if not mode.scaled:
        return None
    block = config.fp16
    get = (lambda name: getattr(block, name)) if block else (lambda name: None)
    static = get("loss_scale") or 0.0
    power = numbers.integer("fp16.initial_scale_power", get("initial_scale_power"))
    window = numbers.integer("fp16.loss_scale_window", get("loss_scale_window"))
    hysteresis = numbers.integer("fp16.hysteresis", get("hysteresis"))
    return LossScale(
        dynamic=not static,
        initial=float(static) if static else 2.0 ** (16 if power is None else power),
        window=1000 if window is None else window,
        hysteresis=2 if hysteresis is None else hysteresis,
        consecutive=bool(get("consecutive_hysteresis")),
        minimum=numbers.number("fp16.min_loss_scale", get("min_loss_scale"), 1.0),
    )


def describe_loss_scale(scale: LossScale | None, mode: Mode, config: Config) -> Decision:
    if scale is None:
        return Decision("loss scale", "none", f"mode {mode} has the range of fp32")
    if not scale.dynamic:
        return Decision("loss scale", f"static {scale.initial:g}", "`fp16.loss_scale`")
    text = f"dynamic from {scale.initial:g}, window {scale.window}, hysteresis {scale.hysteresis}"
    return Decision("loss scale", text, "`fp16` block" if config.fp16 else f"mode {mode}, default scaler")


def decide_optimizer(config: Config, numbers: AutoNumbers, problems: Problems) -> ComponentSpec | None:
    if config.optimizer is None:
        return None
    kind = TYPES.get(config.optimizer.type.lower())
    if kind is None:
        must = f"must be one of {', '.join(dict.fromkeys(TYPES.values()))}"
        other = "Any other elementwise optimizer: build it and pass it to `initialize`."
        do = did_you_mean(config.optimizer.type, TYPES.values()) or other
        problems.add("optimizer.type", must, got=shown(config.optimizer.type), do=do)
        return None
    return ComponentSpec(kind, numbers.params("optimizer.params", kind, config.optimizer.params))


def describe_updates(optimizer: ComponentSpec | None, config: Config) -> tuple[Decision, ...]:
    """List the decisions on unusual updates: Muon's two parts, and statistics."""
    decisions = []
    algorithm = None if optimizer is None else of_type(optimizer.type)
    if algorithm is not None and algorithm.rest is not None:
        why = f"`optimizer.type`; rule: {MUON_RULE}; or `precision.rules[].optimizer`"
        decisions.append(Decision("optimizer", f"{algorithm.name}, {algorithm.rest.name} for the rest", why))
    if config.precision.statistics:
        decisions.append(Decision("statistics", "of every update", "`precision.statistics`"))
    return tuple(decisions)


def decide_schedule(
    config: Config, numbers: AutoNumbers, optimizer: ComponentSpec | None, problems: Problems
) -> ComponentSpec | None:
    if config.scheduler is None:
        return None
    kind = ALIASES.get(config.scheduler.type, config.scheduler.type)
    if kind not in SCHEDULES:
        do = did_you_mean(kind, SCHEDULES) or "Any torch scheduler: build it and pass it to `initialize`."
        problems.add("scheduler.type", f"must be one of {', '.join(SCHEDULES)}", got=shown(kind), do=do)
        return None
    recipe = ComponentSpec(kind, numbers.params("scheduler.params", kind, config.scheduler.params))
    _require_below_the_rate(recipe, optimizer, problems)
    return recipe


def _require_below_the_rate(
    recipe: ComponentSpec, optimizer: ComponentSpec | None, problems: Problems
) -> None:
    """Refuse a schedule whose final rate is not below the optimizer's rate."""
    own = None if optimizer is None else json.loads(optimizer.params).get("lr")
    params = json.loads(recipe.params)
    for kind, name, value in (
        ("polynomial", "lr_end", params.get("lr_end", 1e-7)),
        ("cosine_with_min_lr", "min_lr", params.get("min_lr", 0)),
        ("cosine_warmup_with_min_lr", "min_lr", params.get("min_lr", 0)),
    ):
        if recipe.type == kind and own is not None and value and own <= value:
            must = "must be below the rate of the optimizer, `optimizer.params.lr`"
            problems.add(f"scheduler.params.{name}", must, got=f"{value}, where that is {own}")


EXPERTS = ("*.experts.*",)
"""Default globs: the stacks of experts in models of `transformers`."""


def decide_experts(
    config: Config, mesh: MeshShape, averaging: Averaging, problems: Problems
) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """Return the globs of parameters that are divided over the expert axis; none without such an axis."""
    if mesh.expert == 1:
        return (), ()
    if averaging.before != 1.0:
        when = f"where gradients are divided before they are reduced ({_DIVISORS})"
        must = f"must be left out {when}: those of experts pass fewer ranks"
        problems.add("experts.ranks", must, got=mesh.expert, do="Remove one of the keys.")
    written = config.experts.parameters if config.experts else None
    why = "`experts.parameters`" if written else "default: where transformers stacks experts"
    globs = tuple(written or EXPERTS)
    value = f"{', '.join(globs)} over {mesh.expert} ranks, sharded over {mesh.expert_shard}"
    return globs, (Decision("experts", value, f"`experts.ranks`; {why}"),)


def decide_batch(
    train: int | None, micro: int | None, steps: int | None, ranks: int, problems: Problems
) -> tuple[Batch, str]:
    """Return the three batch numbers, and the reason for the numbers that were not written.

    DeepSpeed's arithmetic: train = micro x accumulation x data-parallel ranks. Any two give the third. With
    only `train` or only `micro` the accumulation is 1. A caller with its own loader may write none.
    """
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
        product = f"{micro} x {steps} x {ranks} = {micro * steps * ranks}"
        must = f"must be {MICRO} x {STEPS} x data-parallel ranks, {product}"
        problems.add(TRAIN, must, got=train, do="Write two of the three; the third follows.")
    return Batch(micro, steps, train), "written in full"


def _quotient(total: int, parts: int, key: str, problems: Problems) -> int:
    if total % parts:
        below, above = total // parts * parts, (total // parts + 1) * parts
        must = f"must be a multiple of {parts} (data-parallel ranks times what each step does on one)"
        do = f"Use {below} or {above}." if below else f"Use {above}, or fewer ranks."
        problems.add(key, must, got=total, do=do)
    return max(1, total // parts)


def describe_batch(sizes: Batch, mesh: MeshShape) -> str:
    if not sizes.micro:
        return f"{_count(sizes.accumulation, 'micro-batch', 'micro-batches')} per step"
    steps = _count(sizes.accumulation, "micro-batch", "micro-batches")
    return f"{sizes.micro} x {steps} x {_count(mesh.data, 'rank', 'ranks')} = {sizes.train}"


def describe_averaging(averaging: Averaging, mesh: MeshShape) -> str:
    if not averaging.mean:
        return "sum over ranks"
    ranks = _count(mesh.data, "rank", "ranks")
    if averaging.before == 1.0:
        return f"mean over {ranks}, divided after the sum"
    return f"mean over {ranks}, divided by {averaging.before:g} before the sum"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
