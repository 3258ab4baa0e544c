"""`load`: the meaning of every key, and errors for impossible values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.unit.refusals import problems, refusal, write
from zerodrift.config import fields
from zerodrift.config.loader import load
from zerodrift.config.schema import Config
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return blocks around a value, so that it lies at a path."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return value


def rule(**keys: Any) -> dict[str, Any]:
    return {"precision": {"rules": [{("class" if key == "klass" else key): v for key, v in keys.items()}]}}


# --- values -----------------------------------------------------------------------------------------


PINNED = "zero_optimization.fp32_pinned_parameters"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("zero_optimization.stage=4", "`zero_optimization.stage`: must be 0, 1, 2 or 3; got 4."),
        ("train_batch_size=1_000", "above 0 or \"auto\"; got '1_000'. Write 1000 without quotes."),
        ("bf16.enabled=1", '`bf16.enabled`: must be true, false or "auto"; got 1.'),
        ("precision.master=splitt", '"split" or "same"; got \'splitt\'. Did you mean `split`?'),
        ("precision.accumulate=bflat16", "bf16 or fp16; got 'bflat16'. Did you mean `bfloat16`"),
        ("precision.reduce=3", "e5m2-128, int4, int4-64-bf16 or a block of keys"),
        ("gradient_clipping=-1", '`gradient_clipping`: must be a number of at least 0 or "auto"; got -1.'),
        (f"{PINNED}=router", "must be a list of strings; got 'router'. Write `[\"router\"]`."),
        ("precision.rules=[x]", "`precision.rules[0]`: must be a block of keys; got 'x'."),
        ("optimizer.params.lr=1", "`optimizer.type`: must be given: a string. AdamW, Adam,"),
        ("optimizer={type: Adam, params: [1]}", "must be a block of arguments; got [1]."),
        ("zero_optimization.load_from_fp32_weights=false", "must be true; got false. Masters always start"),
        ("zero_optimization.offload_optimizer.device=nvme", "got 'nvme'. There is no offload to NVMe."),
        ("zero_optimization=true", 'must be a block of keys; got true. Write `{"stage": 1}` for true'),
    ],
)
def test_a_wrong_value_is_told_in_our_words(override: str, expected: str) -> None:
    (message,) = problems({}, override)
    assert expected in message


@pytest.mark.parametrize(
    ("path", "written", "expected"),
    [
        ("train_batch_size", 2e3, 2000),
        ("steps_per_print", float("inf"), 0),
        ("gradient_clipping", 0, 0.0),
        ("precision.accumulate", "torch.float32", DType.FP32),
        ("precision.reduce", "bfloat16", DType.BF16),
        ("precision.reduce.sum", "half", DType.FP16),
        ("fp16.loss_scale", 128, 128.0),
        ("fp16.loss_scale_window", 1e3, 1000),
        ("zero_optimization.mics_shard_size", -1, -1),
        ("sharding.units", ["layers.*"], ("layers.*",)),
    ],
)
def test_a_right_value_arrives(path: str, written: Any, expected: Any) -> None:
    value: Any = load(nested(path, written))
    for part in path.split("."):
        value = getattr(value, part)
    assert value == expected


JARGON = re.compile(
    r"pydantic|errors\.|https?:|Input|validation|literal|(int|bool|float|string)_type|valid (bool|int)"
)


def test_messages_have_no_words_of_the_validator() -> None:
    """Every field of the schema gets an absurd value."""
    for key in fields.every_key(Config):
        if "[]" not in key.path:
            message = refusal(nested(key.path, [[0.5]]))
            assert f"`{key.path}" in message and not JARGON.search(message), message


# --- rules ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "expected", "right"),
    [
        (rule(pin="fp32"), "[0]`: must say which parameters it is for", rule(match="a", pin="fp32")),
        (rule(match="", pin="fp32"), "must say which", rule(match="", klass="A", pin="fp32")),
        (rule(match="a"), "must set something: a column, `pin` or `output`", rule(match="a", output="keep")),
        (rule(match="a", storage=None), "must set something", rule(match="a", storage="fp32")),
        (rule(match="a", pin="bf16"), "[0].pin`: must be fp32; got 'bf16'.", rule(match="a", pin="float32")),
    ],
)
def test_a_rule_needs_a_subject_and_an_effect(wrong: Any, expected: str, right: Any) -> None:
    (message,) = problems(wrong)
    assert expected in message
    assert len(load(right).precision.rules) == 1


def test_a_misspelt_key_of_a_rule_is_told_once_and_a_dotted_key_is_to_be_nested() -> None:
    place = "precision.rules[0]"
    assert problems(rule(match="a", redcue="fp32")) == [
        f"`{place}.redcue`: must be a key of `{place}`. Did you mean `reduce`?"
    ]
    with pytest.raises(ConfigError, match="Nest it: `zero_optimization` > `stage`"):
        Config(**{"zero_optimization.stage": 3})


# --- unknown keys -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("gradient_cliping=1.0", "Did you mean `gradient_clipping`?"),
        ("zero_optimisation.stage=1", "Did you mean `zero_optimization`?"),
        ("grad_accum_dtype=fp32", "`data_types.grad_accum_dtype` or `gradient_accumulation_dtype`?"),
        ("overlap_comm=true", "Did you mean `zero_optimization.overlap_comm`?"),
        ("zero_optimization.gradient_clipping=1.0", "Did you mean `gradient_clipping` at top level?"),
        ("xyzzy=1", "docs/config.md and docs/deepspeed.md list every key."),
        ("precision.rules=[{match: a, klass: b, pin: fp32}]", "Did you mean `class`?"),
    ],
)
def test_an_unknown_key_gets_the_nearest_known_one(override: str, expected: str) -> None:
    (message,) = problems({}, override)
    assert "must be a key of " in message and expected in message


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    source = {
        "zero_optimization": {"stage": 4, "overlap_com": True, "zeropp_loco_param": {"a": 1}},
        "gradient_cliping": 1.0,
        "bf16": {"enabled": "yes"},
        "amp": {"enabled": True},
        "precision": {"rules": [{"pin": "bf16"}]},
        "steps_per_print": -1,
    }
    path = write(tmp_path, "ds.json", json.dumps(source))
    message = refusal(path, "nonsense")
    assert message.startswith(f"{path}: 10 problems\n  1. ")
    for where in ("zero_optimization.overlap_com", "amp.enabled", "precision.rules[0].pin", "overrides"):
        assert f". `{where}`: must " in message


# --- how keys end -----------------------------------------------------------------------------------


def test_every_key_ends_used_or_ignored_in_the_order_written() -> None:
    source = {
        "wall_clock_breakdown": False,
        "precision": {"rules": [{"match": "a", "pin": "fp32"}, {"class": "B", "reduce": {"wire": "fp32"}}]},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "offload_param": {"device": "none"}},
        "gradient_clipping": None,
        "fp16": {},
        "aio": None,
    }
    used = """precision.rules[0].match precision.rules[0].pin precision.rules[1].class
        precision.rules[1].reduce.wire optimizer.type optimizer.params.lr optimizer.params.betas
        optimizer.params.torch_adam zero_optimization.stage"""
    rest = """zero_optimization.reduce_bucket_size zero_optimization.offload_param.device
        gradient_clipping fp16 aio"""
    assert [(use.path, use.status) for use in load(source).keys] == [
        ("wall_clock_breakdown", "ignored"),
        *((path, "used") for path in used.split()),
        *((path, "ignored") for path in rest.split()),
    ]
    config = load(source)
    assert all(bool(use.because) == (use.status == "ignored") for use in config.keys)
    assert config.gradient_clipping is None and config.fp16 is None


def test_the_old_name_of_bf16() -> None:
    config = load({"bfloat16": {"enabled": True, "immediate_grad_update": True}})
    assert config.bf16 is not None and config.bf16.enabled is True
    assert [use.path for use in config.keys] == ["bfloat16.enabled", "bfloat16.immediate_grad_update"]
    (message,) = problems({"bfloat16": {"enabled": True}, "bf16": {"enabled": True}})
    assert "`bfloat16`: must not come with `bf16`" in message


# --- overrides --------------------------------------------------------------------------------------


def test_overrides_are_yaml_values_at_dotted_paths() -> None:
    config = load(
        {"bf16": {"enabled": True}, "gradient_clipping": 5, **rule(match="a", pin="fp32")},
        [
            "zero_optimization.stage=3",
            "gradient_clipping=",
            "optimizer.type=AdamW",
            "optimizer.params.lr=1e-5",
            "precision.rules[0].match=*.router.*",
            "precision.rules[1].class=torch.nn.LayerNorm",
            "precision.rules[1].reduce={wire: fp32}",
            "sharding.units=[layers.*, head]",
            " backend = native",
        ],
    )
    assert config.zero_optimization.stage == 3
    assert config.gradient_clipping is None
    assert config.optimizer is not None and config.optimizer.params == {"lr": 1e-5}
    subjects = [rule.match or rule.class_ for rule in config.precision.rules]
    assert subjects == ["*.router.*", "torch.nn.LayerNorm"]
    assert config.sharding.units == ("layers.*", "head")
    assert config.backend == "native"
    assert load({}, ["gradient_clipping=1", "gradient_clipping=2"]).gradient_clipping == 2, "the last wins"
    assert load({}, "backend=native").backend == "native"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("foo", "must be `dotted.path=value`; got 'foo'"),
        ("bf16.enabled=!!python/none x", "must have a YAML value"),
        ("gradient_clipping.x=3", "`gradient_clipping`: must be a block to have keys set; got 1.0"),
        ("precision[0]=3", "`precision`: must be a list to have items set"),
        ("precision.rules[2].pin=fp32", "must not lie beyond `precision.rules[0]`"),
    ],
)
def test_a_wrong_override(override: str, expected: str) -> None:
    source = {"gradient_clipping": 1.0, "precision": {"rules": []}}
    assert expected in refusal(source, override)
