"""The policy of a config: `resolve(config, mesh) -> Policy`.

`resolve` interprets `zero_optimization.stage`, `"auto"`, `bf16.enabled` and all other keys with several
spellings. Two keys with one meaning agree, or are an error that names both. Numeric `"auto"` values come from
the caller, or are an error that names the value to pass. `parameters.py` decides the columns of each
parameter.

Invariant: pure. No process group, no device and no environment variable is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from zerodrift import mesh as meshes
from zerodrift.config import Config, ConfigSource, load
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, MeshError, Problems
from zerodrift.mesh import MeshShape
from zerodrift.policy import choices, narrow, order, pipelining, rules
from zerodrift.policy.arguments import AutoNumbers, AutoValues
from zerodrift.policy.backends import BACKENDS
from zerodrift.policy.decisions import Decision, Mode, Policy
from zerodrift.policy.support import DEFAULT_ACCUMULATE, verdict

SAFE_MODULES = ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d")
"""DeepSpeed's default list of classes whose parameters autocast reads in the low dtype."""


def mesh_for(config: ConfigSource, world_size: int, tensor: int = 1) -> MeshShape:
    """Return the mesh of a config on `world_size` ranks.

    `tensor` is the number of ranks that share each DTensor of the model, where it has any.
    """
    config = load(config)
    meshes.require_ranks(world_size)
    if world_size % tensor:
        must = f"must be a multiple of the {tensor} ranks that the model's DTensors are over"
        raise MeshError("world size", must, got=world_size)
    world_size //= tensor
    pipeline = config.pipeline.stages if config.pipeline else 1
    shard = config.zero_optimization.mics_shard_size or 0
    replicate = config.sharding.replicate or 0
    backend = BACKENDS[config.backend or "native"]
    if backend.replicates and (config.zero_optimization.stage or 0) == 0:
        if replicate or shard > 0:
            must = f"must be left out at stage 0 on backend {backend.name}, where every rank replicates"
            raise ConfigError("sharding.replicate", must, got="a hybrid mesh", do="Use stage 1, 2 or 3.")
        replicate = max(1, world_size // pipeline)
    expert = config.experts.ranks if config.experts else 1
    shape = meshes.fit(world_size, replicate, max(0, shard), pipeline, expert)
    key, secondary = choices.secondary_of(config)
    if secondary > 1 and config.zero_optimization.stage == 3:
        shape = meshes.with_secondary(shape, key, secondary)
    return replace(shape, tensor=tensor)


def resolve(config: ConfigSource, mesh: MeshShape, auto: AutoValues | None = None) -> Policy:
    """Decide everything that a config leaves open on a mesh.

    `auto` has the numbers for keys that the config sets to "auto", by dotted key. Keys that contradict each
    other are one ConfigError that names them all.
    """
    config = load(config)
    problems = Problems()
    numbers = AutoNumbers(auto or {}, problems)
    mode_decision = choices.decide_mode(config, problems)
    mode = Mode(mode_decision.value)
    precision = config.precision
    backend = BACKENDS[config.backend or "native"]
    stage = config.zero_optimization.stage or 0
    optimizer, update_decisions = choices.decide_optimizer(config, numbers, problems)
    demands = _demands(config, mode, problems)
    _check_dtypes(config, demands, mode, mesh, problems)
    batch, batch_decision = choices.decide_batch(
        numbers.value(choices.TRAIN, config.train_batch_size),
        numbers.value(choices.MICRO, config.train_micro_batch_size_per_gpu),
        pipelining.decide_micro_batches(
            config, numbers.value(choices.STEPS, config.gradient_accumulation_steps), problems
        ),
        mesh,
        problems,
    )
    clip = numbers.number("gradient_clipping", config.gradient_clipping, 1.0)
    clip_why = "`gradient_clipping`" if config.gradient_clipping is not None else _CLIP_DEFAULT
    averaging, averaging_decision = choices.decide_averaging(config, mesh, problems)
    scale, scale_decision = choices.decide_loss_scale(config, mode, numbers)
    buffers, buffers_why = demands.pop("buffers", ("keep", _BUFFERS_DEFAULT))
    sharding, sharding_decisions = choices.decide_sharding(config, stage, backend, mesh, problems)
    order_of_sums = demands.pop("reduce.order", ("auto", ""))[0]
    pipeline, pipeline_decisions = pipelining.decide_pipeline(
        config, mesh, batch.accumulation, order_of_sums == "tree", problems
    )
    safe, safe_decisions = _safe_modules(config, mode)
    narrows = bool(safe) and "reduce.wire" not in demands
    schedule = choices.decide_schedule(config, numbers, optimizer, problems)
    experts, expert_decisions = choices.decide_experts(config, mesh, averaging, problems)
    decided = order.decide_order(config, mesh, averaging, pipeline, narrows, order_of_sums, problems)
    demands["reduce.order"] = decided
    resolved = rules.from_config(precision.rules, config.zero_optimization.fp32_pinned_parameters or ())
    asked = [(column, value, why) for column, (value, why) in demands.items()]
    asked += [(column, value, rule.why) for rule in resolved for column, value in rule.sets]
    product_decisions = narrow.decide_products(backend.name, asked, problems)
    if mesh.tensor > 1 and not backend.dtensors:
        takes = " or ".join(known.name for known in BACKENDS.values() if known.dtensors)
        must = f"must be {takes} for a model whose parameters are DTensors"
        do = f"Set `backend: {takes}`, or build the model without tensor parallelism."
        problems.add("backend", must, got=f"{backend.name}, and DTensors over {mesh.tensor} ranks", do=do)
    backend.refuse_settings(config, mesh, optimizer, problems)
    _check_wire(demands, asked, mesh, problems)
    print_every = int(numbers.number("steps_per_print", config.steps_per_print, 0))
    numbers.require_all_used()
    problems.raise_as(ConfigError)
    used = {key.path for key in config.keys if key.status == "used"}
    without_effect = [flag for flag in choices.FLAGS if choices.has_flag(config, flag) is False]
    off = {f"{flag.partition('_')[0]}.{flag}" for flag in without_effect}
    decisions = (
        mode_decision,
        Decision("backend", backend.name, "`backend`" if config.backend else "default"),
        *sharding_decisions,
        *pipeline_decisions,
        batch_decision,
        Decision("gradient_clipping", f"{clip:g}" if clip else "off", clip_why),
        averaging_decision,
        *order.decisions(*decided, order_of_sums == "tree"),
        *product_decisions,
        scale_decision,
        *safe_decisions,
        *update_decisions,
        *expert_decisions,
    )
    return Policy(
        mode=mode,
        backend=backend.name,
        demands=tuple((column, value, why) for column, (value, why) in demands.items()),
        rules=resolved,
        safe=safe,
        buffers=None if buffers == "keep" else DType(buffers),
        buffers_why=buffers_why,
        allow_narrow=bool(precision.allow_narrow),
        sharding=sharding,
        batch=batch,
        averaging=averaging,
        clip=clip,
        loss_scale=scale,
        skip_nonfinite=not (config.bf16 and config.bf16.check_grad_overflow is False),
        optimizer=optimizer,
        schedule=schedule,
        statistics=bool(precision.statistics),
        print_every=print_every,
        decisions=decisions,
        ignored=(
            *((key.path, key.because) for key in config.keys if key.status == "ignored"),
            *((path, f"`{path.partition('.')[0]}.enabled` is not true") for path in sorted(off)),
        ),
        used=tuple(sorted(used - off)),
        pipeline=pipeline,
        experts=experts,
        requires_tree=order_of_sums == "tree",
    )


_CLIP_DEFAULT = "default, as in DeepSpeed; 0 is off"
_BUFFERS_DEFAULT = "default: buffers are kept as the model made them"


def _demands(config: Config, mode: Mode, problems: Problems) -> rules.Demands:
    """Return the columns that the config sets for all parameters, from any of the keys that can set them."""
    types = config.data_types
    written: list[tuple[str, object, str]] = [
        *(
            (column, value, f"precision.{'compute' if column.startswith('compute') else column}")
            for column, value in rules.column_values(config.precision)
        ),
        ("accumulate", config.gradient_accumulation_dtype, "gradient_accumulation_dtype"),
        ("accumulate", types.grad_accum_dtype if types else None, "data_types.grad_accum_dtype"),
        ("buffers", config.precision.buffers, "precision.buffers"),
        ("buffers", types.buffer_dtype if types else None, "data_types.buffer_dtype"),
        ("reduce.wire", config.communication_data_type, "communication_data_type"),
        *(
            (column, dtype, f"zero_optimization.{key}")
            for key, column, dtype in _ZERO_PLUS_PLUS
            if getattr(config.zero_optimization, key)
        ),
    ]
    dtype, flag = mode.dtype, f"{mode.dtype}_master_weights_and_grads"
    if choices.has_flag(config, flag):
        key = f"{dtype}.{flag}"
        written += [("master", "same", key), ("accumulate", dtype, key)]
        if mode.autocast:
            written += [("storage", dtype, key), ("compute", dtype, key)]
    if choices.has_flag(config, "bf16_optimizer_states"):
        written.append(("state", "bf16-stochastic", "bf16.bf16_optimizer_states"))
    demands: rules.Demands = {}
    for column, value, key in written:
        if value is None:
            continue
        said, by = demands.setdefault(column, (str(value), key))
        if said != str(value):
            must = f"must agree with `{by}`, which says {said} for `{column}`"
            problems.add(key, must, got=value, do="Keep one of the two keys.")
    return demands


_ZERO_PLUS_PLUS = (
    ("zero_quantized_weights", "gather", DType.INT8_256),
    ("zero_quantized_nontrainable_weights", "frozen", DType.INT8_256),
    ("zero_quantized_gradients", "reduce.wire", DType.INT4_128),
)
"""(key, column, dtype): the columns that the keys of ZeRO++ set."""


def _check_wire(
    demands: rules.Demands, asked: Sequence[tuple[str, str, str]], mesh: MeshShape, problems: Problems
) -> None:
    """Refuse options of a narrow wire where none is narrow, and feedback where gradients are rounded a second
    time, between replicas."""
    is_narrow = any(column == "reduce.wire" and DType(value).format for column, value, _ in asked)
    for column, word, refusal in (
        ("reduce.feedback", "true", narrow.NO_WIRE),
        ("reduce.rounding", "stochastic", narrow.NEAREST),
    ):
        value, why = demands.get(column, ("", ""))
        if value == word and not is_narrow:
            wire, _ = demands.get("reduce.wire", ("the dtype of the gradient", ""))
            problems.add(why, refusal.must, got=wire, do=refusal.do)
    if mesh.replicate > 1 or mesh.expert > 1:
        for column, value, why in asked:
            if (column, value) == ("reduce.feedback", "true"):
                problems.add(why, narrow.TWICE.must, got="true", do=narrow.TWICE.do)


def _check_dtypes(
    config: Config, demands: rules.Demands, mode: Mode, mesh: MeshShape, problems: Problems
) -> None:
    """Refuse parameters of another dtype than the mode's, and an `accumulate` that is not supported."""
    dtype = config.data_types.param_dtype if config.data_types else None
    expected = DType.FP32 if mode.autocast else mode.dtype
    if dtype is not None and dtype is not expected:
        must = f"must agree with mode {mode}, whose parameters are {expected}"
        do = "Remove it, or choose the mode with `bf16`, `fp16` or `precision.mode`."
        problems.add("data_types.param_dtype", must, got=dtype, do=do)
    value, key = demands.get("accumulate", (str(DEFAULT_ACCUMULATE), "precision.mode"))
    stage, backend = config.zero_optimization.stage or 0, config.backend or "native"
    supported = verdict(mode, DType(value), mesh.pipeline > 1, stage, backend)
    allowed = config.precision.allow_narrow or demands.get("compute", ("",))[0] == value
    if supported.status == "no" or (supported.status == "narrow" and not allowed):
        must = f"must be a supported `accumulate` in mode {mode} at stage {stage}, backend {backend}"
        problems.add(key, must, got=f"{value}: {supported.reason}")


def _safe_modules(config: Config, mode: Mode) -> tuple[tuple[str, ...], tuple[Decision, ...]]:
    """Return the classes whose parameters autocast reads in the low dtype; none in other modes."""
    if not mode.autocast:
        return (), ()
    given = config.torch_autocast.lower_precision_safe_modules if config.torch_autocast else None
    safe = SAFE_MODULES if given is None else tuple(given)
    why = "default list" if given is None else "`torch_autocast.lower_precision_safe_modules`"
    text = ", ".join(name.rpartition(".")[2] for name in safe)
    return safe, (Decision("safe modules", text, why),) if safe else ()
