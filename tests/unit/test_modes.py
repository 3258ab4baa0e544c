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
            assert (bf16, fp16) == ("true", "true")
            must = r"`bf16\.enabled`: must not be true together with `fp16\.enabled`"
            with pytest.raises(ConfigError, match=must):
                mode(config(bf16, fp16))
        else:
            assert mode(config(bf16, fp16)) == row[2], (bf16, fp16)
    pairs = [pair for row in RULE for pair in matching(row)]
    assert sorted(pairs) == sorted(product(["absent", "auto", "false", "true"], repeat=2)), "each once"


AUTO = {"precision": {"mode": "auto"}}
LOW_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        # `precision.mode: auto` counts as asking
        *((config(**AUTO), "bf16"), (config(fp16="false", **AUTO), "bf16")),
        *((config("false", **AUTO), "fp32"), (config("false", "false", **AUTO), "fp32")),
        *((config(fp16="true", **AUTO), "fp16"), (config("auto", "auto", **AUTO), "bf16")),
        *(({"precision": {"mode": name}}, name) for name in ("fp32", "bf16", "fp16", "autocast-fp16")),
        ({"precision": {"mode": "autocast-bf16"}, **config("false")}, "autocast-bf16"),
        ({"torch_autocast": {"enabled": True}}, "autocast-bf16"),
        # a flag of bf16 that only sets dtypes of masters and states
        ({"bf16": LOW_STATES, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "autocast-bf16"),
    ],
    ids=str,
)
def test_a_mode_is_what_is_written_or_asked_for(written: dict[str, object], expected: str) -> None:
    assert mode(written) == expected


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
        ({"bf16": LOW_STATES, "torch_autocast": {**AUTOCAST, "dtype": "float16"}}, "bf16.enabled"),
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
