"""Policy: defaults with reasons, rules, ties, one key with one meaning, and each refusal with its twin."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.models import LINEAR, NORM, moe, parameter, tied
from zerodrift import ConfigError, MeshShape, ModelSpec, Plan, build, load, mesh_for, resolve
from zerodrift.dtypes import DType
from zerodrift.model.spec import ModelSpec as Spec
from zerodrift.policy.nouns import Policy

MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")


def plan(written: dict[str, Any], model: ModelSpec | None = None, world: int = 2) -> Plan:
    config = load(written)
    mesh = mesh_for(config, world)
    return build(resolve(config, mesh), model or moe(), mesh)


def cells(
    written: dict[str, Any], name: str, model: ModelSpec | None = None, world: int = 2
) -> dict[str, str]:
    row = plan(written, model, world).row(name)
    assert row is not None
    return row.columns.cells()


def at(stage: int, mode: str, **precision: Any) -> dict[str, Any]:
    return {"precision": {"mode": mode, **precision}, "zero_optimization": {"stage": stage}}


def policy(written: dict[str, Any], mesh: MeshShape | None = None, **auto: float) -> Policy:
    return resolve(load(written), mesh or MeshShape(), {k.replace("__", "."): v for k, v in auto.items()})


ROUTER = "model.layers.1.mlp.gate.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
NORMW = "model.layers.1.input_layernorm.weight"


# --- defaults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fp32", "fp32/ fp32 fp32 fp32 fp32/ fp32 same/ fp32/ fp32"),
        ("bf16", "bf16/ bf16 bf16 bf16 fp32/ fp32 split/ fp32/ bf16"),
        ("fp16", "fp16/ fp16 fp16 fp16 fp32/ fp32 fp32/ fp32/ fp16"),
        ("autocast-bf16", "fp32/ bf16 bf16 bf16 fp32/ bf16>fp32 same/ fp32/ fp32"),
        ("autocast-fp16", "fp32/ fp16 fp16 fp16 fp32/ fp16>fp32 same/ fp32/ fp32"),
    ],
)
def test_defaults_of_every_mode_at_stage_3(mode: str, expected: str) -> None:
    assert list(cells(at(3, mode), QUERY).values()) == expected.split()


@pytest.mark.parametrize("mode", ["autocast-bf16", "autocast-fp16"])
def test_autocast_leaves_unsafe_modules_in_fp32(mode: str) -> None:
    assert set(cells(at(3, mode), NORMW).values()) == {"fp32", "fp32/", "same/"}


@pytest.mark.parametrize(
    ("stage", "storage", "accumulate", "master"),
    [
        (0, "bf16", "fp32", "split"),
        (1, "bf16", "fp32", "split/"),
        (2, "bf16", "fp32/", "split/"),
        (3, "bf16/", "fp32/", "split/"),
    ],
)
def test_a_stage_is_only_sharding_columns(stage: int, storage: str, accumulate: str, master: str) -> None:
    found = cells(at(stage, "bf16"), QUERY)
    assert (found["storage"], found["accumulate"], found["master"]) == (storage, accumulate, master)


def test_when_is_a_column_that_moves_the_accumulator() -> None:
    assert cells(at(3, "bf16", reduce={"when": "last"}), QUERY)["accumulate"] == "fp32"
    assert cells(at(1, "bf16", reduce={"when": "every"}), QUERY)["accumulate"] == "fp32/"


def test_a_frozen_parameter_has_no_update_and_is_never_widened() -> None:
    spec = Spec(
        "adapters", (parameter("base.w", (8, 8), dtype=DType.BF16, trained=False), parameter("a.w", (8, 8)))
    )
    frozen = cells(at(3, "fp32"), "base.w", spec)
    assert frozen["storage"] == "bf16/" and frozen["compute"] == "fp32"
    assert {frozen[c] for c in ("grad", "accumulate", "reduce", "master", "state")} == {"-"}
    assert cells(at(3, "fp32"), "a.w", spec)["master"] == "same/"
    assert cells(at(2, "bf16"), "a.w", spec)["master"] == "split/", "its fp32 bits are kept"
    assert cells(at(2, "bf16"), "base.w", spec)["storage"] == "bf16"


def test_an_integer_parameter_stays_what_it_is() -> None:
    spec = Spec("q", (parameter("w", (8, 8), dtype=DType.INT8, trained=False), parameter("v", (8,))))
    assert cells(at(3, "bf16"), "w", spec)["storage"] == "int8"


def test_export_follows_the_checkpoint_then_compute_and_pins_stay() -> None:
    model = moe()
    with_source = Spec(
        model.source, model.parameters, model.buffers, ((QUERY, DType.FP32), (ROUTER, DType.BF16))
    )
    written = at(3, "bf16", rules=[{"match": "*.mlp.gate.weight", "pin": "fp32"}])
    assert cells(written, QUERY, with_source)["export"] == "fp32"
    assert cells(written, ROUTER, with_source)["export"] == "fp32"
    assert cells(written, NORMW, with_source)["export"] == "bf16"


def test_an_fp8_checkpoint_does_not_set_the_export() -> None:
    spec = Spec("v3", (parameter("w", (8, 8)),), (), (("w", DType.FP8_E4M3),))
    assert cells(at(0, "bf16"), "w", spec)["export"] == "bf16"


# --- rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stage", range(4))
def test_a_pin_is_fp32_in_every_column_at_every_stage(mode: str, stage: int) -> None:
    found = cells(at(stage, mode, rules=[{"match": "*.mlp.gate.weight", "pin": "fp32"}]), ROUTER)
    assert {text.rstrip("/") for text in found.values()} <= {"fp32", "same"}


def test_a_pin_survives_narrow_defaults() -> None:
    written = at(2, "bf16", accumulate="bf16", rules=[{"match": "*.gate.weight", "pin": "fp32"}])
    written["communication_data_type"] = "bf16"
    assert {t.rstrip("/") for t in cells(written, ROUTER).values()} <= {"fp32", "same"}
    assert cells(written, QUERY)["accumulate"] == "bf16/"


def test_deepspeed_substrings_pin_and_our_rules_win_over_them() -> None:
    written = at(3, "bf16")
    written["zero_optimization"]["fp32_pinned_parameters"] = ["gate", "norm"]
    assert cells(written, ROUTER)["compute"] == "fp32"
    assert cells(written, NORMW)["storage"] == "fp32/"
    written["precision"]["rules"] = [
        {"match": "*norm*", "storage": "bf16", "gather": "bf16", "compute": "bf16"}
    ]
    made = plan(written)
    row = made.row(NORMW)
    assert row is not None and row.columns.storage.dtype is DType.BF16 and not row.columns.pinned


def test_the_last_match_wins_cell_by_cell() -> None:
    rules = [
        {"match": "*", "state": "bf16-stochastic", "master": "fp32"},
        {"match": "*.gate.*", "state": "fp32"},
    ]
    found = cells(at(1, "bf16", rules=rules), ROUTER)
    assert (found["state"], found["master"]) == ("fp32/", "fp32/")
    reasons = plan(at(1, "bf16", rules=rules)).row(ROUTER).columns.reasons()  # type: ignore[union-attr]
    assert reasons["state"] == "precision.rules[1]: '*.gate.*'"
    assert reasons["master"] == "precision.rules[0]: '*'"


def test_class_rules_name_a_class_where_it_is_imported_from() -> None:
    for name in ("torch.nn.Linear", "torch.nn.modules.linear.Linear", "Linear"):
        assert cells(at(1, "bf16", rules=[{"class": name, "pin": "fp32"}]), QUERY)["storage"] == "fp32"
    with pytest.raises(ConfigError, match=r"rules\[0\]: 'torch\.Linears'"):
        plan(at(1, "bf16", rules=[{"class": "torch.Linears", "pin": "fp32"}]))


def test_match_and_class_together_narrow() -> None:
    rules = [{"match": "*.gate.*", "class": "torch.nn.Linear", "pin": "fp32"}]
    assert cells(at(1, "bf16", rules=rules), ROUTER)["storage"] == "fp32"
    assert cells(at(1, "bf16", rules=rules), QUERY)["storage"] == "bf16"


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("*.router.weight", "model."), ("*.mlp.gates.weight", "mlp.gate.weight"), ("nothing", "model")],
)
def test_a_rule_that_matches_nothing_names_what_is_near(pattern: str, hint: str) -> None:
    with pytest.raises(ConfigError, match="must match a parameter") as caught:
        plan(at(3, "bf16", rules=[{"match": pattern, "pin": "fp32"}]))
    assert pattern in str(caught.value) and hint in str(caught.value)


def test_a_class_rule_without_classes_says_where_to_get_them() -> None:
    spec = Spec("index", (parameter("a.w", (4, 4), klass=""),))
    with pytest.raises(ConfigError, match="no module classes"):
        plan(at(0, "bf16", rules=[{"class": "torch.nn.Linear", "pin": "fp32"}]), spec)


def test_all_unmatched_rules_are_reported_at_once() -> None:
    rules = [{"match": "one", "pin": "fp32"}, {"match": "*", "pin": "fp32"}, {"match": "two", "pin": "fp32"}]
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*'one'.*'two'"):
        plan(at(3, "bf16", rules=rules))


@pytest.mark.parametrize("name", [ROUTER, NORMW])
@pytest.mark.parametrize("told", ["keep", "input"])
def test_a_row_has_the_output_that_a_rule_says(name: str, told: str) -> None:
    rules = [{"match": "*gate*", "pin": "fp32"}, {"match": "*norm*", "pin": "fp32"}]
    row = plan(at(0, "bf16", rules=rules)).row(name)
    assert row is not None and row.columns.output is None
    row = plan(at(0, "bf16", rules=[*rules, {"match": "*", "output": told}])).row(name)
    assert row is not None and row.columns.output == told


def test_tied_parameters_get_one_row_and_the_widest_demand() -> None:
    made = plan(at(3, "bf16", rules=[{"match": "lm_head.weight", "pin": "fp32"}]), moe(tie=True))
    row = made.row("model.embed_tokens.weight")
    assert row is made.row("lm_head.weight") and row is not None
    assert row.columns.storage.dtype is DType.FP32 and row.columns.pinned
    assert "widest" in row.columns.reasons()["compute"] or "lm_head" in row.columns.reasons()["compute"]


def test_under_autocast_a_tied_parameter_is_low_only_if_every_owner_is_safe() -> None:
    both = Spec("t", (tied(("a.weight", "b.weight"), (8, 8), (LINEAR, LINEAR)),))
    mixed = Spec("t", (tied(("a.weight", "b.weight"), (8, 8), (LINEAR, NORM)),))
    assert cells(at(3, "autocast-bf16"), "a.weight", both)["gather"] == "bf16"
    assert cells(at(3, "autocast-bf16"), "a.weight", mixed)["gather"] == "fp32"


def test_the_safe_list_is_exact_and_replaces_the_default() -> None:
    written = {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["models.RMSNorm"]}}
    written["zero_optimization"] = {"stage": 3}
    assert cells(written, NORMW)["gather"] == "bf16"
    assert cells(written, QUERY)["gather"] == "fp32"


# --- one key, one meaning ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(
    "written",
    [
        {"gradient_accumulation_dtype": "fp32"},
        {"data_types": {"grad_accum_dtype": "float32"}},
        {"precision": {"accumulate": "fp32"}},
    ],
    ids=["top", "data_types", "precision"],
)
def test_accumulation_dtype_means_the_same_everywhere(mode: str, stage: int, written: dict[str, Any]) -> None:
    precision = {"mode": mode, **written.get("precision", {})}
    config = {**written, "precision": precision, "zero_optimization": {"stage": stage}}
    assert cells(config, QUERY)["accumulate"].rstrip("/") == "fp32"


def test_two_keys_for_one_column_must_agree() -> None:
    agreeing = at(1, "bf16", accumulate="bf16") | {"gradient_accumulation_dtype": "bf16"}
    assert cells(agreeing, QUERY)["accumulate"] == "bf16"
    with pytest.raises(ConfigError) as caught:
        plan(at(1, "bf16", accumulate="bf16") | {"data_types": {"grad_accum_dtype": "fp32"}})
    assert "`data_types.grad_accum_dtype`" in str(caught.value) and "`precision.accumulate`" in str(
        caught.value
    )


@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16"])
def test_communication_data_type_is_the_wire_in_every_mode(mode: str) -> None:
    assert cells(at(2, mode) | {"communication_data_type": "fp32"}, QUERY)["reduce"] == "fp32"
    assert cells(at(2, "bf16") | {"communication_data_type": "bf16"}, QUERY)["reduce"] == "bf16>fp32"


def test_buffers_are_kept_unless_told() -> None:
    expected = {"model.rotary.inv_freq": DType.FP32, "model.steps": DType.INT64}
    for written in ({}, {"data_types": {"buffer_dtype": "bf16"}}, {"precision": {"buffers": "bf16"}}):
        made = plan({"bf16": {"enabled": True}, **written})
        cast = {"model.rotary.inv_freq": DType.BF16} if written else {}
        assert {b.name: b.storage for b in made.buffers} == expected | cast


def test_bf16_masters_and_states_of_deepspeed() -> None:
    flags = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    found = cells({"bf16": flags, "zero_optimization": {"stage": 2}}, QUERY)
    assert (found["master"], found["accumulate"], found["state"]) == ("same/", "bf16/", "bf16-stochastic/")


# --- refusals, each with a twin that is accepted ----------------------------------------------------

FP16_WIRE = {"communication_data_type": "fp16"}
REFUSED = [
    (at(1, "fp32", accumulate="bf16"), at(1, "fp32", accumulate="bf16", allow_narrow=True), "allow_narrow"),
    (at(1, "fp16", accumulate="bf16"), at(1, "fp16", accumulate="fp16"), "allow_narrow"),
    (at(1, "bf16", accumulate="fp16"), at(1, "bf16", accumulate="bf16"), "65504"),
    (at(1, "bf16", accumulate="fp16", allow_narrow=True), at(1, "bf16"), "65504"),
    (at(1, "fp16", master="split"), at(1, "bf16", master="split"), "split"),
    (at(1, "bf16", grad="fp32"), at(1, "bf16", grad="bf16"), "accumulate"),
    (at(1, "autocast-bf16", gather="bf16"), at(3, "bf16", gather="bf16"), "stage 3"),
    (at(3, "bf16", gather="fp16"), at(3, "bf16", gather="bf16"), "gather"),
    (
        at(1, "bf16", reduce={"wire": "fp32", "sum": "bf16"}),
        at(1, "bf16", reduce={"wire": "bf16", "sum": "bf16"}),
        "sum",
    ),
    (
        at(1, "bf16", rules=[{"match": "*", "compute": "fp16"}]),
        at(1, "fp16", rules=[{"match": "*", "compute": "bf16"}]),
        "loss",
    ),
    (at(1, "bf16") | FP16_WIRE, at(1, "fp16") | FP16_WIRE, "65504"),
    (
        at(1, "bf16") | {"data_types": {"param_dtype": "fp32"}},
        at(1, "bf16") | {"data_types": {"param_dtype": "bf16"}},
        "data_types.param_dtype",
    ),
]


@pytest.mark.parametrize(("refused", "accepted", "word"), REFUSED)
def test_refusals_and_their_twins(refused: dict[str, Any], accepted: dict[str, Any], word: str) -> None:
    assert plan(accepted)
    with pytest.raises(ConfigError) as caught:
        plan(refused)
    assert word in str(caught.value)


def test_an_unknown_optimizer_or_schedule_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.type.*AdamW"):
        policy({"optimizer": {"type": "Adamm"}})
    with pytest.raises(ConfigError, match=r"scheduler\.type.*WarmupLR"):
        policy({"scheduler": {"type": "WarmUpLR"}})
    assert policy({"optimizer": {"type": "adamw"}}).optimizer is not None


# --- batch, numbers, mesh ---------------------------------------------------------------------------

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({TRAIN: 32}, (8, 1, 32)),
        ({MICRO: 2}, (2, 1, 8)),
        ({MICRO: 2, STEPS: 3}, (2, 3, 24)),
        ({TRAIN: 32, STEPS: 2}, (4, 2, 32)),
        ({TRAIN: 32, MICRO: 2}, (2, 4, 32)),
        ({TRAIN: 32, MICRO: 4, STEPS: 2}, (4, 2, 32)),
        ({STEPS: 5}, (0, 5, 0)),
        ({}, (0, 1, 0)),
    ],
)
def test_batch_arithmetic(written: dict[str, int], expected: tuple[int, int, int]) -> None:
    batch = policy(written, MeshShape(shard=4)).batch
    assert (batch.micro, batch.accumulation, batch.train) == expected


@pytest.mark.parametrize("written", [{TRAIN: 30}, {TRAIN: 32, MICRO: 3}, {TRAIN: 32, MICRO: 4, STEPS: 3}])
def test_batch_numbers_that_do_not_multiply(written: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        policy(written, MeshShape(shard=4))


def test_numeric_auto_takes_the_callers_number_or_says_what_to_pass() -> None:
    assert policy({"gradient_clipping": "auto"}, gradient_clipping=0.5).clip == 0.5
    with pytest.raises(ConfigError, match=r"--auto gradient_clipping="):
        policy({"gradient_clipping": "auto"})
    made = policy({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, optimizer__params__lr=0.1)
    assert made.optimizer is not None and '"lr": 0.1' in made.optimizer.params
    betas = resolve(
        load({"optimizer": {"type": "AdamW", "params": {"betas": "auto"}}}),
        MeshShape(),
        {"optimizer.params.betas": (0.9, 0.95)},
    ).optimizer
    assert betas is not None and '"betas": [0.9, 0.95]' in betas.params
    with pytest.raises(ConfigError, match="must be one number"):
        resolve(load({"gradient_clipping": "auto"}), MeshShape(), {"gradient_clipping": [1.0, 2.0]})
    with pytest.raises(ConfigError, match="whole number"):
        policy({STEPS: "auto"}, gradient_accumulation_steps=1.5)


def test_a_number_for_a_key_that_is_not_auto_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be 'auto'"):
        policy({"gradient_clipping": 1.0}, gradient_clipping=0.5)


def test_loss_scale_keys() -> None:
    block = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3}
    scale = policy({"fp16": {**block, "min_loss_scale": 4, "consecutive_hysteresis": True}}).loss_scale
    assert scale is not None and scale.dynamic
    assert (scale.initial, scale.window, scale.hysteresis, scale.minimum) == (256.0, 50, 3, 4.0)
    assert scale.consecutive
    static = policy({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale
    assert static is not None and not static.dynamic and static.initial == 128.0
    auto = policy({"torch_autocast": {"enabled": True, "dtype": "fp16"}, "fp16": {"loss_scale_window": 7}})
    assert auto.loss_scale is not None and auto.loss_scale.window == 7
    assert policy({"bf16": {"enabled": True}}).loss_scale is None


@pytest.mark.parametrize(
    ("written", "mean", "before"),
    [
        ({}, True, 1.0),
        ({"prescale_gradients": True}, True, 4.0),
        ({"gradient_predivide_factor": 2.0}, True, 2.0),
        ({"gradient_allreduce_op": "sum"}, False, 1.0),
    ],
)
def test_averaging(written: dict[str, Any], mean: bool, before: float) -> None:
    averaging = policy(written, MeshShape(shard=4)).averaging
    assert (averaging.mean, averaging.before) == (mean, before)


def test_meshes() -> None:
    def shape(written: dict[str, Any], world: int) -> tuple[int, int, int]:
        mesh = mesh_for(load(written), world)
        return mesh.shard, mesh.replicate, mesh.pipeline

    assert shape({}, 8) == (8, 1, 1)
    assert shape({"sharding": {"replicate": 2}}, 8) == (4, 2, 1)
    assert shape({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, 8) == (2, 4, 1)
    assert shape({"pipeline": {"stages": 4}}, 8) == (2, 1, 4)
    assert shape({"backend": "fsdp2"}, 8) == (1, 8, 1)


@pytest.mark.parametrize(
    ("written", "world"),
    [({"sharding": {"replicate": 3}}, 8), ({"pipeline": {"stages": 3}}, 8), ({}, 0)],
)
def test_a_world_that_does_not_divide(written: dict[str, Any], world: int) -> None:
    from zerodrift import MeshError

    with pytest.raises(MeshError, match="must"):
        mesh_for(load(written), world)


# --- one module, one compute dtype ------------------------------------------------------------------


def biased() -> Spec:
    """Routers with a bias, and a module of somebody's own that may do as it likes with its two."""
    mine = [
        parameter(f"layers.{layer}.own.{name}", (4,), "own.Module") for layer in range(2) for name in "ab"
    ]
    names = [f"layers.{layer}.router.{name}" for layer in range(2) for name in ("weight", "bias")]
    return Spec("biased", tuple([*(parameter(name, (4, 4)) for name in names), *mine]))


def test_a_weight_that_is_pinned_without_its_bias_is_refused() -> None:
    written = at(3, "bf16", rules=[{"match": "*.router.weight", "pin": "fp32"}])
    message = (
        r"`precision\.rules\[0\]: .*`: must leave all parameters of a module one `compute` dtype; got weight "
        r"fp32, bias bf16 in `layers\.0\.router` and 1 more\. Match them together: `layers\.\*\.router\.\*`"
    )
    with pytest.raises(ConfigError, match=message):
        plan(written, biased())
    assert plan(at(3, "bf16", rules=[{"match": "*.router.*", "pin": "fp32"}]), biased())
    assert plan(at(3, "bf16", rules=[{"match": "*.own.a", "pin": "fp32"}]), biased()), "its own affair"
    assert plan(at(3, "autocast-bf16", rules=written["precision"]["rules"]), biased())
    assert plan(at(3, "fp32", rules=written["precision"]["rules"]), biased())
