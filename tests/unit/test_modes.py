"""The rule for `auto`: every row of the documented table, and conflicting flags."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from zerodrift import ConfigError, MeshShape, load, resolve
from zerodrift.policy.choices import from_flags

PAGE = (Path(__file__).parents[2] / "docs" / "config.md").read_text()
CELLS = r"^\| ((?:not )?\w+) \| ((?:not )?\w+) \| (\w+) \| "
RULE = re.findall(CELLS, PAGE.partition("| reason |\n")[2].partition("\n\n")[0], re.MULTILINE)
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
            chosen, why = from_flags(bf16, fp16, asks)  # type: ignore[arg-type]
            assert why and (chosen is None) == (row[2] == "error")
        if row[2] == "error":
            must = r"`bf16\.enabled`: must not be true together with `fp16\.enabled`"
            with pytest.raises(ConfigError, match=must):
                mode(config(bf16, fp16))
        else:
            assert mode(config(bf16, fp16)) == row[2], (bf16, fp16)


def test_the_rule_covers_every_pair_of_flags_once() -> None:
    pairs = [pair for row in RULE for pair in matching(row)]
    assert sorted(pairs) == sorted(product(["absent", "auto", "false", "true"], repeat=2))
    assert [row[:2] for row in RULE if row[2] == "error"] == [("true", "true")]


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [
        *(("absent", "absent", "bf16"), ("absent", "false", "bf16"), ("false", "absent", "fp32")),
        *(("false", "false", "fp32"), ("absent", "true", "fp16"), ("auto", "auto", "bf16")),
    ],
)
def test_precision_mode_auto_counts_as_asking(bf16: str, fp16: str, expected: str) -> None:
    assert mode(config(bf16, fp16, precision={"mode": "auto"})) == expected


def test_autocast_with_a_flag_that_only_sets_master_and_state_dtypes() -> None:
    low = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    written = {"bf16": low, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    assert mode(written) == "autocast-bf16"
    with pytest.raises(ConfigError, match=r"bf16\.enabled"):
        mode({**written, "torch_autocast": {"enabled": True, "dtype": "float16"}})


def test_autocast_without_a_dtype_is_bf16_and_says_so() -> None:
    policy = resolve(load({"torch_autocast": {"enabled": True}}), MeshShape())
    (decision,) = [d for d in policy.decisions if d.key == "precision.mode"]
    assert decision.value == "autocast-bf16" and "not given" in decision.why


@pytest.mark.parametrize(
    ("written", "on"),
    [
        ({"bf16": {"enabled": True}}, True),
        ({"bf16": {}, "precision": {"mode": "bf16"}}, True),
        *(({"bf16": {}}, False), ({"bf16": {"enabled": False}}, False)),
        ({"bf16": {}, "fp16": {"enabled": True}}, False),
    ],
    ids=str,
)
def test_flags_of_a_block_that_is_off_are_listed_as_ignored(written: dict[str, Any], on: bool) -> None:
    flags = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    policy = resolve(load({**written, "bf16": {**written["bf16"], **flags}}), MeshShape())
    demanded = {value for _, value, key in policy.demands if key in {f"bf16.{flag}" for flag in flags}}
    assert demanded == ({"same", "bf16", "bf16-stochastic"} if on else set())
    ignored = [] if on else [(f"bf16.{flag}", "`bf16.enabled` is not true") for flag in flags]
    assert [pair for pair in policy.ignored if pair[0].startswith("bf16.")] == ignored
    assert not {f"bf16.{flag}" for flag in flags} & set(policy.used) or on


LOW = {"mode": "autocast-bf16"}
AUTOCAST = {"enabled": True, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("written", "key"),
    [
        ({"bf16": {"enabled": True}, "torch_autocast": AUTOCAST}, "bf16.enabled"),
        ({"fp16": {"enabled": True}, "torch_autocast": AUTOCAST}, "fp16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "fp32"}}, "torch_autocast.dtype"),
        ({"precision": {"mode": "bf16"}, "fp16": {"enabled": True}}, "fp16.enabled"),
        ({"precision": {"mode": "bf16"}, "bf16": {"enabled": False}}, "bf16.enabled"),
        ({"precision": {"mode": "fp32"}, "bf16": {"enabled": True}}, "bf16.enabled"),
        ({"precision": {"mode": "fp32"}, "torch_autocast": {"enabled": True}}, "precision.mode"),
        (config(precision=LOW, torch_autocast={"enabled": False}), "torch_autocast.enabled"),
        (config(precision=LOW, torch_autocast={"dtype": "fp16"}), "torch_autocast.dtype"),
    ],
    ids=str,
)
def test_two_keys_that_disagree_are_an_error(written: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        mode(written)
    assert f"`{key}`" in str(caught.value)


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "autocast-bf16", "autocast-fp16"])
def test_a_written_mode_is_the_mode(name: str) -> None:
    assert mode({"precision": {"mode": name}}) == name
    if name.startswith("autocast"):
        assert mode(config("false", torch_autocast={"enabled": True, "dtype": name[9:]})) == name
