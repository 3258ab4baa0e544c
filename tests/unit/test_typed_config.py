"""Typed configs equal the dict, field by field, have the same errors, and pass a type checker."""

from __future__ import annotations

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import zerodrift as zd
from tests.unit.models import moe
from zerodrift import dtypes
from zerodrift.config import fields
from zerodrift.config.schema import Config, DTypeKey, ExportKey, Frozen, GatherKey, Product, Storage, WireKey

MOST = """
precision:
  {storage: bf16, compute: bf16, accumulate: fp32, master: split, state: bf16-stochastic, frozen: nf4,
   mode: bf16, reduce: {wire: bf16, sum: fp32, when: every, order: rank}, buffers: keep, allow_narrow: false,
   rules: [{match: "*.experts.*", class: torch.nn.Linear, placement: sliced, master: fp32}]}
sharding: {replicate: 2, units: ["model.layers.*"], keep_gathered: micro-batch, prefetch: 1048576}
zero_optimization: {stage: 3, offload_optimizer: {device: none}, load_from_fp32_weights: true}
gradient_clipping: 0.5
train_batch_size: 32
train_micro_batch_size_per_gpu: 4
optimizer: {type: AdamW, params: {lr: 0.001, betas: [0.9, 0.95]}}
scheduler: {type: WarmupLR, params: {warmup_num_steps: 10}}"""
AUTOCAST = """
torch_autocast: {enabled: true, dtype: bf16, lower_precision_safe_modules: [torch.nn.Linear]}
precision: {rules: [{match: "*.q_proj.*", optimizer: Muon}]}
optimizer: {type: Muon, params: {lr: 0.02}}"""
FP16_KEYS = "fp16: {enabled: true, initial_scale_power: 12, hysteresis: 3, min_loss_scale: 2.0}"
WRITTEN = {"most keys": (4, MOST), "autocast": (2, AUTOCAST), "fp16": (2, FP16_KEYS)}
"""Configs with keys of every type, with their numbers of ranks."""


MODEL = moe(layers=4)


def typed(kind: Any, value: Any) -> Any:
    """Return a value as typed blocks, all the way down."""
    block, item = fields.block_of(kind), fields.item_of(kind)
    if isinstance(value, dict) and block is not None:
        known = fields.fields(block)
        arguments = {name: typed(known[name], inner) for name, inner in value.items()}
        return block(**{("class_" if name == "class" else name): inner for name, inner in arguments.items()})
    if isinstance(value, list) and item is not None:
        return [typed(item, inner) for inner in value]
    return value


@pytest.mark.parametrize("case", WRITTEN)
def test_a_typed_config_is_the_dict_and_the_file(case: str, tmp_path: Path) -> None:
    world, text = WRITTEN[case]
    written = yaml.safe_load(text)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    ways = {"file": str(path), "typed": typed(Config, written), "blocks of dicts": Config(**written)}
    mesh = zd.mesh_for(written, world)
    policy = zd.resolve(written, mesh)
    for way, config in ways.items():
        assert zd.mesh_for(config, world) == mesh, way
        assert zd.resolve(config, mesh) == policy, way
        made, plain = (zd.make_plan(each, MODEL, world) for each in (config, written))
        assert made.digest == plain.digest, way


def test_overrides_come_after_what_is_typed() -> None:
    config = zd.Config(precision=zd.Precision(mode="bf16"))
    loaded = zd.load(config, ["precision.mode=fp16"])
    assert loaded.precision.mode == "fp16" and config.precision.mode == "bf16"
    with pytest.raises(zd.ConfigError, match="`overrides`: must come with the file or dict"):
        zd.load(loaded, ["precision.mode=bf16"])
    assert zd.load(loaded) is loaded
    assert zd.make_plan(loaded, MODEL).digest != zd.make_plan(config, MODEL).digest


FP16 = zd.Fp16(enabled=True)
BF16 = zd.Bf16(enabled=True)
ALONE = zd.MeshShape()
REFUSED: dict[str, Callable[[], Any]] = {
    "Config: `precision.reduce.wire`: must": lambda: zd.Config(precision={"reduce": {"wire": "bf17"}}),  # type: ignore
    "Config: `precision.mod`: must be a key of": lambda: zd.Config(precision={"mod": "bf16"}),  # type: ignore[arg-type]
    "Rule: `class_`: must be a string; got 3.": lambda: zd.Rule(class_=3, pin="fp32"),  # type: ignore[arg-type]
    "`Rule`: must set something: a column, `pin` or `output`": lambda: zd.Rule(match="*"),
    "Config: `bf16`: must be a block of keys; got a `Fp16`": lambda: zd.Config(bf16=FP16),  # type: ignore[arg-type]
    "config: `bf16`: must be a block of keys; got a `Fp16`. Write `Bf16": lambda: zd.load({"bf16": FP16}),
    "`Precision`: must get its fields by name; got 1 without.": lambda: zd.Precision("bf16"),  # type: ignore[misc]
    "`Config.backend`: must be given when it is made": lambda: setattr(zd.Config(), "backend", "fsdp2"),
    "`bf16.enabled`: must not be true together": lambda: zd.resolve(zd.Config(bf16=BF16, fp16=FP16), ALONE),
    "`config`: must be given; got none. Pass the path of a YAML or JSON file, ": lambda: zd.load(None),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_one_error_of_ours(message: str) -> None:
    with pytest.raises(zd.ConfigError) as caught:
        REFUSED[message]()
    assert str(caught.value).startswith(message)
    assert caught.value.__context__ is None, "no traceback of pydantic's"


# --- what type checkers know -------------------------------------------------------------------------------


def test_the_dtypes_that_are_offered_are_those_that_are_admitted() -> None:
    words = {column: {dtypes.word(dtype, row) for dtype in row} for column, row in dtypes.ADMITTED.items()}
    keys: dict[str, Any] = {"storage": Storage, "frozen": Frozen, "gather": GatherKey, "reduce.wire": WireKey}
    keys |= {"compute.product": Product, "export": ExportKey}
    for column, admitted in words.items():
        offered = typing.get_args(keys.get(column, DTypeKey))
        offered = {word for option in offered for word in _words(option)}
        assert offered == admitted, column


def _words(option: Any) -> set[str]:
    """Return the words among the alternatives of an annotation."""
    if typing.get_origin(option) is Literal:
        return set(typing.get_args(option))
    return {word for inner in typing.get_args(option) for word in _words(inner)}
