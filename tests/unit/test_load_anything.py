"""`load` gives a Config or raises ConfigError, for anything whatsoever."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.refused import write
from zerodrift.config import deepspeed, fields
from zerodrift.config.load import load
from zerodrift.config.schema import Config
from zerodrift.errors import ConfigError

NAMES = sorted(
    {part for key in fields.every_key(Config) for part in key.path.replace("[]", "").split(".")}
    | {part for key in deepspeed.ENTRIES for part in key.split(".")}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**30), max_value=10**30),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "fp32", "bf16", "cpu", "none", "last", "\ud800", "*.router.*", ""]),
    st.binary(max_size=4),
    st.dates(),
    st.sets(st.integers(), max_size=2),
)
KEYS = st.one_of(
    st.sampled_from(NAMES), st.text(max_size=6), st.integers(), st.none(), st.tuples(st.text(max_size=2))
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=15,
)
PATHS = sorted({*(key.path.replace("[]", "[0]") for key in fields.every_key(Config)), *deepspeed.ENTRIES})


def loads_or_says(source: Any, *overrides: str) -> None:
    try:
        config = load(source, overrides)
    except ConfigError as error:
        assert str(error).encode()
    else:
        assert isinstance(config, Config)
        json.dumps([[use.path, use.value, use.status, use.because] for use in config.keys])


@settings(deadline=None, max_examples=300)
@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), KEYS), VALUES, max_size=5))
@pytest.mark.long
def test_any_dict_loads_or_is_a_config_error(source: Any) -> None:
    loads_or_says(source)


@settings(deadline=None, max_examples=150)
@given(VALUES)
def test_anything_loads_or_is_a_config_error(source: Any) -> None:
    if not (isinstance(source, str) and os.path.exists(source)):
        loads_or_says(source)


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(PATHS), st.text(alphabet="*&![]{}:,-'\"|>%@#= \n\t0123456789abefln.", max_size=12))
def test_any_override_loads_or_is_a_config_error(path: str, value: str) -> None:
    loads_or_says({}, f"{path}={value}")
    loads_or_says({}, value)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


YAML_PIECES = st.one_of(
    st.sampled_from("*&!?|>%@#{}[]:,-'\"~\\\n\t \x00\ufeff\u2028\u00e9"),
    st.sampled_from(
        ["\n  ", ": ", "- ", "<<: ", "&a ", "*a", "!!", "!!int ", "!x ", "---\n", "...\n", "\\U"]
    ),
    st.sampled_from(["bf16", "enabled", "true", "1e-5", "0x", ".inf", ".nan", "precision", "rules"]),
)


@settings(deadline=None, max_examples=400)
@given(st.one_of(st.lists(YAML_PIECES, max_size=14).map("".join), st.text(max_size=20)))
def test_any_yaml_text_loads_or_is_a_config_error(scratch: Path, text: str) -> None:
    loads_or_says(write(scratch, "a.yaml", text.encode("utf-8", "surrogatepass")))


JSON_PIECES = st.one_of(
    st.sampled_from(['{"', '"', '": ', ", ", "}", "[", "]", "1", "-", "e9", "true", "\n", "//"]),
    st.sampled_from(["NaN", "Infinity", "\\ud800", "\\u0000", "bf16"]),
)


@settings(deadline=None, max_examples=200)
@given(st.one_of(st.lists(JSON_PIECES, max_size=14).map("".join), st.binary(max_size=20)))
def test_any_json_text_loads_or_is_a_config_error(scratch: Path, text: str | bytes) -> None:
    loads_or_says(write(scratch, "a.json", text))
    loads_or_says(write(scratch, "a", text))
