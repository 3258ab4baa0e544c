"""The decisions that are not a column: sharding, clipping, averaging, loss scale, optimizer, schedule.

Each function reads its keys and returns the decided value with its reason. Which dtype a parameter has is
decided elsewhere (`columns.py`); whether a combination is supported too (`support.py`).

Invariant: every function is pure and total: what cannot be meant goes to `problems`, never raises.
"""

from __future__ import annotations

import json

from zerodrift.config.plain_tree import shown
from zerodrift.config.schema import Config
from zerodrift.errors import Problems, did_you_mean
from zerodrift.mesh import MeshShape
from zerodrift.optimizers import TYPES, of_type
from zerodrift.policy import matrices
from zerodrift.policy.arguments import ALIASES, SCHEDULES
from zerodrift.policy.backends import Backend
from zerodrift.policy.nouns import Averaging, Batch, ComponentSpec, Decision, LossScale, Mode, ShardingPolicy
from zerodrift.policy.numbers import AutoNumbers


def sharding(config: Config, stage: int, backend: Backend) -> tuple[ShardingPolicy, tuple[Decision, ...]]:
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
    decisions = [
        Decision(
            "stage",
            str(stage),
            "`zero_optimization.stage`" if zero.stage is not None else "default: nothing is sharded",
        )
    ]
    if stage == 3 or backend.storage_sharded:
        decisions.append(Decision("keep_gathered", keep, kept_why))
    if block.prefetch is not None and stage == 3:
        decisions.append(Decision("prefetch", f"{block.prefetch:,} bytes", "`sharding.prefetch`"))
    decisions.append(
        Decision(
            "accumulator",
            "freed after the step" if free else "kept between steps",
            "`sharding.accumulator`" if block.accumulator else "default: memory goes back to activations",
        )
    )
    if offload:
        decisions.append(
            Decision(
                "offload",
                "master and state",
                "`zero_optimization.offload_optimizer.device`: in host memory; the bill counts them too",
            )
        )
    policy = ShardingPolicy(
        stage,  # type: ignore[arg-type]
        tuple(block.units or ()),
        keep,
        free,
        offload,
        block.prefetch or 0,
    )
    return policy, tuple(decisions)


def clip(config: Config, numbers: AutoNumbers) -> tuple[float, str]:
    written = config.gradient_clipping
    clip = numbers.number("gradient_clipping", written, 1.0)
    if written is None:
        return clip, "default, as in DeepSpeed; 0 is off"
    return clip, "`gradient_clipping`"


def averaging(config: Config, mesh: MeshShape, problems: Problems) -> tuple[Averaging, str]:
    mean = config.gradient_allreduce_op != "sum"
    factor = config.gradient_predivide_factor
    if not mean and (config.prescale_gradients or factor not in (None, 1.0)):
        problems.add(
            "gradient_allreduce_op",
            "must be `mean` where gradients are divided (`prescale_gradients`, `gradient_predivide_factor`)",
            got="sum",
            do="Remove one of the keys.",
        )
    if config.prescale_gradients:
        if factor not in (None, 1.0):
            problems.add(
                "gradient_predivide_factor",
                "must be left out with `prescale_gradients: true`, which divides by all ranks before",
                got=str(factor),
                do="Keep one of the two keys.",
            )
        return Averaging(mean, float(mesh.data)), "`prescale_gradients`"
    if factor not in (None, 1.0):
        return Averaging(mean, float(factor or 1.0)), "`gradient_predivide_factor`"
    return Averaging(mean, 1.0), "`gradient_allreduce_op`" if config.gradient_allreduce_op else "default"


def loss_scale(config: Config, mode: Mode, numbers: AutoNumbers) -> LossScale | None:
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


def scale_decision(scale: LossScale | None, mode: Mode, config: Config) -> Decision:
    if scale is None:
        return Decision("loss scale", "none", f"mode {mode} has the range of fp32")
    if not scale.dynamic:
        return Decision("loss scale", f"static {scale.initial:g}", "`fp16.loss_scale`")
    text = f"dynamic from {scale.initial:g}, window {scale.window}, hysteresis {scale.hysteresis}"
    return Decision("loss scale", text, "`fp16` block" if config.fp16 else f"mode {mode}, default scaler")


def optimizer(config: Config, numbers: AutoNumbers, problems: Problems) -> ComponentSpec | None:
    if config.optimizer is None:
        return None
    kind = TYPES.get(config.optimizer.type.lower())
    if kind is None:
        problems.add(
            "optimizer.type",
            f"must be one of {', '.join(dict.fromkeys(TYPES.values()))}",
            got=shown(config.optimizer.type),
            do=did_you_mean(config.optimizer.type, TYPES.values())
            or "Any other elementwise optimizer: build it and pass it to `initialize`.",
        )
        return None
    return ComponentSpec(kind, numbers.params("optimizer.params", kind, config.optimizer.params))


def update_decisions(optimizer: ComponentSpec | None, config: Config) -> tuple[Decision, ...]:
    """How updates are shared out and watched, where that is not as usual."""
    decisions = []
    algorithm = None if optimizer is None else of_type(optimizer.type)
    if algorithm is not None and algorithm.rest is not None:
        why = f"`optimizer.type`; rule: {matrices.RULE}; or `precision.rules[].optimizer`"
        decisions.append(Decision("optimizer", f"{algorithm.name}, {algorithm.rest.name} for the rest", why))
    if config.precision.statistics:
        decisions.append(Decision("statistics", "of every update", "`precision.statistics`"))
    return tuple(decisions)


def schedule(
    config: Config, numbers: AutoNumbers, optimizer: ComponentSpec | None, problems: Problems
) -> ComponentSpec | None:
    if config.scheduler is None:
        return None
    kind = ALIASES.get(config.scheduler.type, config.scheduler.type)
    if kind not in SCHEDULES:
        problems.add(
            "scheduler.type",
            f"must be one of {', '.join(SCHEDULES)}",
            got=shown(kind),
            do=did_you_mean(kind, SCHEDULES) or "Any torch scheduler: build it and pass it to `initialize`.",
        )
        return None
    recipe = ComponentSpec(kind, numbers.params("scheduler.params", kind, config.scheduler.params))
    _require_below_the_rate(recipe, optimizer, problems)
    return recipe


def _require_below_the_rate(
    recipe: ComponentSpec, optimizer: ComponentSpec | None, problems: Problems
) -> None:
    """That a schedule that goes down to a rate begins above it."""
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
"""Where the models of `transformers` stack their experts."""


def experts(
    config: Config, mesh: MeshShape, averaging: Averaging, problems: Problems
) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """Which parameters are divided over the expert axis, where there is one."""
    if mesh.expert == 1:
        return (), ()
    if averaging.before != 1.0:
        problems.add(
            "experts.ranks",
            "must be left out where gradients are divided before they are reduced (`prescale_gradients`, "
            "`gradient_predivide_factor`): those of experts pass fewer ranks",
            got=str(mesh.expert),
            do="Remove one of the keys.",
        )
    written = config.experts.parameters if config.experts else None
    why = "`experts.parameters`" if written else "default: where transformers stacks experts"
    globs = tuple(written or EXPERTS)
    value = f"{', '.join(globs)} over {mesh.expert} ranks, sharded over {mesh.expert_shard}"
    return globs, (Decision("experts", value, f"`experts.ranks`; {why}"),)


def batch_text(sizes: Batch, mesh: MeshShape) -> str:
    if not sizes.micro:
        return f"{_count(sizes.accumulation, 'micro-batch', 'micro-batches')} per step"
    steps = _count(sizes.accumulation, "micro-batch", "micro-batches")
    return f"{sizes.micro} x {steps} x {_count(mesh.data, 'rank', 'ranks')} = {sizes.train}"


def averaging_text(averaging: Averaging, mesh: MeshShape) -> str:
    if not averaging.mean:
        return "sum over ranks"
    ranks = _count(mesh.data, "rank", "ranks")
    if averaging.before == 1.0:
        return f"mean over {ranks}, divided after the sum"
    return f"mean over {ranks}, divided by {averaging.before:g} before the sum"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
