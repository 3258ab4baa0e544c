"""Policy: defaults with reasons, rules, ties, one key with one meaning, and each refusal with its twin."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.unit.models import LINEAR, NORM, at, moe, parameter, plan, tied
from tests.unit.refusals import error_of
from zerodrift import ConfigError, MeshError, MeshShape, ModelSpec, ZerodriftError, load, mesh_for, resolve
from zerodrift.dtypes import DType
from zerodrift.policy.choices import from_flags
from zerodrift.policy.decisions import Policy

MODES = ("fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16")
ROUTER = "model.layers.1.mlp.gate.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
NORMW = "model.layers.1.input_layernorm.weight"
PINNED = {"match": "*.mlp.gate.weight", "pin": "fp32"}


def cells(written: dict[str, Any], name: str, model: ModelSpec | None = None) -> dict[str, str]:
    row = plan(written, model).row(name)
    assert row is not None
    return row.columns.cells()


def ruled(*rules: dict[str, Any]) -> dict[str, Any]:
    return at(1, "bf16", rules=list(rules))


def policy(written: dict[str, Any], mesh: MeshShape | None = None, **auto: Any) -> Policy:
    return resolve(load(written), mesh or MeshShape(), {k.replace("__", "."): v for k, v in auto.items()})


# --- cells ------------------------------------------------------------------------------------------


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
    if mode.startswith("autocast"):
        assert set(cells(at(3, mode), NORMW).values()) == {"fp32", "fp32/", "same/"}, "no safe module"


FROZEN = parameter("base.w", (8, 8), dtype=DType.BF16, trained=False)
ADAPTERS = ModelSpec("adapters", (FROZEN, parameter("a.w", (8, 8))))
NUMBERS = ModelSpec("q", (parameter("w", (8, 8), dtype=DType.INT8, trained=False), parameter("v", (8,))))
STORED = ModelSpec("m", moe().parameters, (), ((QUERY, DType.FP32), (ROUTER, DType.BF16)))
FP8 = ModelSpec("v3", (parameter("w", (8, 8)),), (), (("w", DType.FP8_E4M3),))
MIXED = ModelSpec("t", (tied(("a.weight", "b.weight"), (8, 8), (LINEAR, NORM)),))
NARROW = {"rules": [PINNED], "accumulate": "bf16"}
WIRE_BF16, WIRE_FP16, WIRE_FP32 = ({"communication_data_type": dtype} for dtype in ("bf16", "fp16", "fp32"))
SUBSTRINGS = at(3) | {"zero_optimization": {"stage": 3, "fp32_pinned_parameters": ["gate", "norm"]}}
LOW_NORM = {"match": "*norm*", **dict.fromkeys(("storage", "gather", "compute"), "bf16")}
LOW_NORMS = {"precision": {"mode": "bf16", "rules": [LOW_NORM]}}
SAFE_LIST = {"enabled": True, "lower_precision_safe_modules": ["models.RMSNorm"]}
SAFE = {"torch_autocast": SAFE_LIST, "zero_optimization": {"stage": 3}}
LOW = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
LOW_MASTERS = {"bf16": LOW, "zero_optimization": {"stage": 2}}
NO_UPDATE = dict.fromkeys(("grad", "accumulate", "reduce", "master", "state"), "-")
LATER = ({"match": "*", "state": "bf16-stochastic", "master": "fp32"}, {"match": "*.gate.*", "state": "fp32"})
NARROWED = {"match": "*.gate.*", "class": "torch.nn.Linear", "pin": "fp32"}
CELLS: dict[str, tuple[dict[str, Any], str, ModelSpec | None, dict[str, str]]] = {
    "a frozen bf16 base": (at(2), "base.w", ADAPTERS, {"storage": "bf16"}),
    "fp32 adapters keep their bits": (at(2), "a.w", ADAPTERS, {"master": "split/"}),
    "integers": (at(3), "w", NUMBERS, {"storage": "int8"}),
    "export as stored": (at(3, rules=[PINNED]), QUERY, STORED, {"export": "fp32"}),
    "fp8 sets no export": (at(0), "w", FP8, {"export": "bf16"}),
    "not pinned, narrow": (at(2, **NARROW) | WIRE_BF16, QUERY, None, {"accumulate": "bf16/"}),
    "substring": (SUBSTRINGS, ROUTER, None, {"compute": "fp32"}),
    "a rule wins over a substring": (SUBSTRINGS | LOW_NORMS, NORMW, None, {"storage": "bf16/"}),
    "match and class": (ruled(NARROWED), ROUTER, None, {"storage": "fp32"}),
    "tied, one safe": (at(3, "autocast-bf16"), "a.weight", MIXED, {"gather": "fp32"}),
    "no longer on it": (SAFE, QUERY, None, {"gather": "fp32"}),
    "bf16 wire": (at(2) | WIRE_BF16, QUERY, None, {"reduce": "bf16>fp32"}),
    "low masters of DeepSpeed": (LOW_MASTERS, QUERY, None, {"master": "same/", "accumulate": "bf16/"}),
    "low states of DeepSpeed": (LOW_MASTERS, QUERY, None, {"state": "bf16-stochastic/"}),
}


@pytest.mark.parametrize("case", CELLS)
def test_cells(case: str) -> None:
    written, name, model, expected = CELLS[case]
    assert expected.items() <= cells(written, name, model).items()


# --- rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "stage"), list(zip(MODES, (0, 1, 2, 3, 3), strict=True)))
def test_a_pin_is_fp32_in_every_column_at_every_stage(mode: str, stage: int) -> None:
    for written in (at(stage, mode, rules=[PINNED]), at(stage, **NARROW) | WIRE_BF16):
        assert {text.rstrip("/") for text in cells(written, ROUTER).values()} <= {"fp32", "same"}


def test_a_cell_names_the_rule_that_set_it_and_what_matches_nothing_is_told_at_once() -> None:
    reasons = plan(ruled(*LATER)).row(ROUTER).columns.reasons()  # type: ignore[union-attr]
    assert reasons["state"] == "precision.rules[1]: '*.gate.*'"
    assert reasons["master"] == "precision.rules[0]: '*'"
    rules = [{"match": match, "pin": "fp32"} for match in ("one", "*", "two")]
    with pytest.raises(ConfigError, match=r"(?s)2 problems.*'one'.*'two'"):
        plan(at(3, rules=rules))
    spec = ModelSpec("index", (parameter("a.w", (4, 4), klass=""),))
    with pytest.raises(ConfigError, match="no module classes"):
        plan(at(0, rules=[{"class": "torch.nn.Linear", "pin": "fp32"}]), spec)


def test_tied_parameters_get_one_row_and_the_widest_demand() -> None:
    made = plan(at(3, rules=[{"match": "lm_head.weight", "pin": "fp32"}]), moe(tie=True))
    row = made.row("model.embed_tokens.weight")
    assert row is made.row("lm_head.weight") and row is not None
    assert row.columns.storage.dtype is DType.FP32 and row.columns.pinned


# --- one key, one meaning ---------------------------------------------------------------------------


def test_accumulation_dtype_means_the_same_everywhere() -> None:
    for way in ({"gradient_accumulation_dtype": "fp32"}, {"data_types": {"grad_accum_dtype": "float32"}}):
        assert cells(at(1, "fp16") | way, QUERY) == cells(at(1, "fp16", accumulate="fp32"), QUERY), way


def test_buffers_are_kept_unless_told() -> None:
    expected = {"model.rotary.inv_freq": DType.FP32, "model.steps": DType.INT64}
    for written in ({}, {"data_types": {"buffer_dtype": "bf16"}}, {"precision": {"buffers": "bf16"}}):
        made = plan({"bf16": {"enabled": True}, **written})
        cast = {"model.rotary.inv_freq": DType.BF16} if written else {}
        assert {b.name: b.storage for b in made.buffers} == expected | cast


# --- refusals, each with a twin that is accepted ----------------------------------------------------

ALL, REDUCE = {"match": "*"}, {"wire": "fp32", "sum": "bf16"}
PARAM_FP32, SUMS_FP32 = ({"data_types": {key: "fp32"}} for key in ("param_dtype", "grad_accum_dtype"))
REFUSED = [
    (at(1, "fp32", accumulate="bf16"), at(1, "fp32", accumulate="bf16", allow_narrow=True), "allow_narrow"),
    (at(1, accumulate="fp16"), at(1, accumulate="bf16"), "65504"),
    (at(1, "fp16", master="split"), at(1, master="split"), "split"),
    (at(1, grad="fp32"), at(1, grad="bf16"), "accumulate"),
    (at(1, "autocast-bf16", gather="bf16"), at(3, gather="bf16"), "stage 3"),
    (at(3, gather="fp16"), at(3, gather="bf16"), "gather"),
    (at(1, reduce=REDUCE), at(1, reduce={**REDUCE, "wire": "bf16"}), "sum"),
    (at(1, rules=[{**ALL, "compute": "fp16"}]), at(1, "fp16", rules=[{**ALL, "compute": "bf16"}]), "loss"),
    (at(1) | WIRE_FP16, at(1, "fp16") | WIRE_FP16, "65504"),
    (at(1) | PARAM_FP32, at(1) | {"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype"),
    (at(1, accumulate="bf16") | SUMS_FP32, at(1, accumulate="fp32") | SUMS_FP32, "`precision.accumulate`"),
]


@pytest.mark.parametrize(("refused", "accepted", "word"), REFUSED)
def test_refusals_and_their_twins(refused: dict[str, Any], accepted: dict[str, Any], word: str) -> None:
    assert plan(accepted)
    assert word in error_of(ConfigError, plan, refused)


# --- batch, numbers, mesh ---------------------------------------------------------------------------

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({TRAIN: 32}, (8, 1, 32)),
        ({MICRO: 2, STEPS: 3}, (2, 3, 24)),
        ({TRAIN: 32, MICRO: 2}, (2, 4, 32)),
        ({TRAIN: 30}, None),
        ({TRAIN: 32, MICRO: 4, STEPS: 3}, None),
    ],
)
def test_batch_arithmetic(written: dict[str, int], expected: tuple[int, int, int] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="train_batch_size"):
            policy(written, MeshShape(shard=4))
        return
    batch = policy(written, MeshShape(shard=4)).batch
    assert (batch.micro, batch.accumulation, batch.train) == expected


def test_numeric_auto_takes_the_callers_number() -> None:
    assert policy({"gradient_clipping": "auto"}, gradient_clipping=0.5).clip == 0.5
    for name, number, shown in (("lr", 0.1, '"lr": 0.1'), ("betas", (0.9, 0.95), '"betas": [0.9, 0.95]')):
        adamw = {"optimizer": {"type": "AdamW", "params": {name: "auto"}}}
        made = policy(adamw, **{f"optimizer__params__{name}": number})
        assert made.optimizer is not None and shown in made.optimizer.params


def test_a_number_for_auto_that_does_not_do() -> None:
    with pytest.raises(ConfigError, match="--auto gradient_clipping="):
        policy({"gradient_clipping": "auto"})
    with pytest.raises(ConfigError, match="must be 'auto'"):
        policy({"gradient_clipping": 1.0}, gradient_clipping=0.5)


def test_loss_scale_keys() -> None:
    block = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 50, "hysteresis": 3}
    scale = policy({"fp16": {**block, "min_loss_scale": 4, "consecutive_hysteresis": True}}).loss_scale
    assert scale is not None and scale.dynamic and scale.consecutive
    assert (scale.initial, scale.window, scale.hysteresis, scale.minimum) == (256.0, 50, 3, 4.0)
    static = policy({"fp16": {"enabled": True, "loss_scale": 128}}).loss_scale
    assert static is not None and not static.dynamic and static.initial == 128.0
    assert policy({"bf16": {"enabled": True}}).loss_scale is None


@pytest.mark.parametrize(
    ("written", "shape"),
    [
        ({}, (8, 1, 1)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, (2, 4, 1)),
        ({"pipeline": {"stages": 4}}, (2, 1, 4)),
    ],
)
def test_meshes(written: dict[str, Any], shape: tuple[int, int, int]) -> None:
    mesh = mesh_for(load(written), 8)
    assert (mesh.shard, mesh.replicate, mesh.pipeline) == shape
    with pytest.raises(MeshError, match="must"):
        mesh_for(load({"sharding": {"replicate": 3}}), 8)


SECONDARY = "`sharding.secondary`"
STAGE3 = {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("written", "ranks", "decided"),
    [
        ({**STAGE3, "sharding": {"secondary": 4}}, 4, "second copy of the blocks over 4 of 8 ranks"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, 2, "second copy"),
        ({**STAGE3, "sharding": {"secondary": 4}, "experts": {"ranks": 2}}, 4, ", of experts over 2"),
        ({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}}, 1, "none"),
        ({**STAGE3, "sharding": {"secondary": 3}}, None, "must divide the 8 ranks of a shard group; got 3"),
        ({**STAGE3, "sharding": {"secondary": 2, "keep_gathered": "step"}}, None, "stay gathered"),
        (
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "sharding": {"secondary": 4}},
            *(None, "must agree with `zero_optimization.zero_hpz_partition_size`, which says 2; got 4"),
        ),
    ],
)
def test_a_second_copy(written: dict[str, Any], ranks: int | None, decided: str) -> None:
    if ranks is None:
        told = error_of(ZerodriftError, lambda: policy(written, mesh_for(load(written), 8)))
        assert decided in told and SECONDARY in told
        return
    mesh = mesh_for(load(written), 8)
    decisions = [one for one in policy(written, mesh).decisions if one.key == "secondary"]
    assert mesh.secondary == ranks
    assert decisions and all(decided in one.value for one in decisions)


# --- one module, one compute dtype ------------------------------------------------------------------


def test_a_weight_that_is_pinned_without_its_bias_is_refused() -> None:
    """Modules of a user's own may pin one of the two. The error has the rule to paste."""
    names = [f"layers.{layer}.router.{name}" for layer in range(2) for name in ("weight", "bias")]
    mine = [parameter(f"layers.{n}.own.{name}", (4,), "own.Module") for n in range(2) for name in "ab"]
    biased = ModelSpec("biased", (*(parameter(name, (4, 4)) for name in names), *mine))
    rules = [{"match": "*.router.weight", "pin": "fp32"}]
    written = [{"match": "*.router.weight", "compute": "fp32", "reduce": {"wire": "fp32"}}]
    for given, pasted in ((rules, "pin: fp32}"), (written, "compute: fp32, reduce: {wire: fp32}}")):
        told = error_of(ConfigError, plan, at(3, rules=given), biased)
        assert "rules[0]" in told and "weight fp32, bias bf16 in `layers.0" in told
        assert f'`{{match: "layers.*.router.*", {pasted}`' in told
    for match in ("*.router.*", "*.own.a"):
        assert plan(at(3, rules=[{"match": match, "pin": "fp32"}]), biased)
    for mode in ("autocast-bf16", "fp32"):
        assert plan(at(3, mode, rules=rules), biased)


# --- narrow exports -----------------------------------------------------------------------------------------


def layers() -> ModelSpec:
    """Return a model with one parameter of each kind for a narrow export."""
    linear = {"up": 256, "cut": 192, "rest": 320, "mlp.gate": 4, "lm_head": 96}
    found = [parameter(f"{name}.weight", (size, 256), "Linear") for name, size in linear.items()]
    found += [parameter("embed.weight", (96, 256), "Embedding"), parameter("norm.weight", (256,), NORM)]
    found.append(parameter("turned.weight", (256, 512), "Conv1D"))
    return ModelSpec("layers", (*found, parameter("experts.down_proj", (4, 256, 128), "Experts")))


def exports(export: str, *rules: dict[str, str]) -> dict[str, tuple[str, str]]:
    config = {"precision": {"mode": "bf16", "export": export, "rules": list(rules)}}
    rows = plan(config, layers()).rows
    return {row.name: (str(row.columns.export), row.columns.reasons()["export"]) for row in rows}


@pytest.mark.parametrize(
    ("export", "narrow"),
    [
        ("fp8-128x128", {"up.weight", "rest.weight", "experts.down_proj"}),
        ("fp8-row", {"up.weight", "cut.weight", "rest.weight", "experts.down_proj"}),
        ("nf4", {"up.weight", "cut.weight", "rest.weight"}),
    ],
)
def test_a_narrow_export_is_for_linear_layers(export: str, narrow: set[str]) -> None:
    found = exports(export)
    assert {name for name, (dtype, _) in found.items() if dtype != "bf16"} == narrow
    assert found["embed.weight"][1].endswith("is for linear layers, and this is an embedding")


def test_a_rule_narrows_what_a_library_reads_and_nothing_else() -> None:
    rules = [{"match": f"{name}.weight", "export": "fp8-128x128"} for name in ("lm_head", "cut")]
    found = exports("fp8-128x128", *rules)
    assert found["lm_head.weight"][0] == found["cut.weight"][0] == "fp8-128x128"
    for name in ("embed", "turned", "norm"):
        with pytest.raises(ConfigError, match="`export` must not be fp8-row where no library reads it: a"):
            exports("bf16", {"match": f"{name}.weight", "export": "fp8-row"})
    with pytest.raises(ConfigError, match=r"one narrow format.*got int8-row and fp8-row"):
        exports("fp8-row", {"match": "up.weight", "export": "int8-row"})


# --- modes ------------------------------------------------------------------------------------------------


PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
CELLS_OF_A_ROW = r"^\| ((?:not )?\w+) \| ((?:not )?\w+) \| (\w+) \| "
RULE = re.findall(CELLS_OF_A_ROW, PAGE.partition("| reason |\n")[2].partition("\n\n")[0], re.MULTILINE)
WRITTEN = {"true": True, "false": False, "auto": "auto"}


def config(bf16: str = "absent", fp16: str = "absent", **rest: object) -> dict[str, object]:
    flags = {"bf16": bf16, "fp16": fp16}
    blocks = {key: {"enabled": WRITTEN[value]} for key, value in flags.items() if value != "absent"}
    return {**blocks, **rest}


def mode(written: dict[str, object]) -> str:
    return str(resolve(load(written), MeshShape()).mode)


def matching(row: tuple[str, str, str]) -> list[tuple[str, str]]:
    """Return the pairs of flags that a row of the table covers."""
    options = [["absent", "auto", "false"] if cell == "not true" else [cell] for cell in row[:2]]
    return list(product(*options))


@pytest.mark.parametrize("row", RULE, ids=lambda row: f"bf16 {row[0]}, fp16 {row[1]}")
def test_every_row_of_the_rule(row: tuple[str, str, str]) -> None:
    for bf16, fp16 in matching(row):
        for asks in (False, True):
            chosen, why = from_flags(WRITTEN.get(bf16), WRITTEN.get(fp16), asks)  # type: ignore[arg-type]
            assert why and (chosen is None) == (row[2] == "error")
        if row[2] == "error":
            assert (bf16, fp16) == ("true", "true")
            must = r"`bf16\.enabled`: must not be true together with `fp16\.enabled`"
            with pytest.raises(ConfigError, match=must):
                mode(config(bf16, fp16))
        else:
            assert mode(config(bf16, fp16)) == row[2], (bf16, fp16)
    pairs = [pair for row in RULE for pair in matching(row)]
    assert sorted(pairs) == sorted(product(["absent", "auto", "false", "true"], repeat=2)), "each once"


AUTO = {"precision": {"mode": "auto"}}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # `precision.mode: auto` counts as asking
        *((config(**AUTO), "bf16"), (config("false", **AUTO), "fp32")),
        *((config(fp16="true", **AUTO), "fp16"), (config("auto", "auto", **AUTO), "bf16")),
        *(({"precision": {"mode": name}}, name) for name in ("fp32", "bf16", "fp16", "autocast-fp16")),
        ({"precision": {"mode": "autocast-bf16"}, **config("false")}, "autocast-bf16"),
        ({"torch_autocast": {"enabled": True}}, "autocast-bf16"),
        # a flag of bf16 that only sets dtypes of masters and states
        ({"bf16": LOW, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast-bf16"),
    ],
    ids=str,
)
def test_a_mode_is_what_is_written_or_asked_for(written: dict[str, object], expected: str) -> None:
    assert mode(written) == expected


@pytest.mark.parametrize("block", [{}, {"enabled": False}])
def test_flags_of_a_block_that_is_off_are_listed_as_ignored(block: dict[str, Any]) -> None:
    policy = resolve(load({"bf16": {**dict.fromkeys([*LOW][1:], True), **block}}), MeshShape())
    assert not any(key.startswith("bf16.") for _, _, key in policy.demands)
    flags = [(key, why) for key, why in policy.ignored if key.startswith("bf16.bf16_")]
    assert flags == [(f"bf16.{flag}", "`bf16.enabled` is not true") for flag in [*LOW][1:]]


LOW_MODE = {"mode": "autocast-bf16"}
AUTOCAST = {"enabled": True, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"bf16": {"enabled": True}, "torch_autocast": AUTOCAST}, "bf16.enabled"),
        ({"bf16": LOW, "torch_autocast": {**AUTOCAST, "dtype": "float16"}}, "bf16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype"),
        ({"precision": {"mode": "fp32"}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"precision": {"mode": "bf16"}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"precision": {"mode": "bf16"}, "bf16": {"enabled": False}}, "bf16.enabled"),
        ({"fp16": {"enabled": True}, "torch_autocast": AUTOCAST}, "fp16.enabled"),
        ({"precision": {"mode": "fp32"}, "torch_autocast": {"enabled": True}}, "precision.mode"),
        (config(precision=LOW_MODE, torch_autocast={"enabled": False}), "torch_autocast.enabled"),
        (config(precision=LOW_MODE, torch_autocast={"dtype": "fp16"}), "torch_autocast.dtype"),
        ({"prescale_gradients": True, "gradient_predivide_factor": 4.0}, "gradient_predivide_factor"),
        (
            {"zero_optimization": {"cpu_offload": True, "offload_optimizer": {"device": "none"}}},
            "zero_optimization.cpu_offload",
        ),
    ],
    ids=str,
)
def test_two_keys_that_disagree_are_an_error(written: dict[str, object], key: str) -> None:
    assert f"`{key}`" in error_of(ConfigError, mode, written)
