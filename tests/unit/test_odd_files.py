"""Directories, devices and absurd texts give one error at once, for a config, a job and a model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.refusals import write
from zerodrift import ConfigError, ModelError, describe, load
from zerodrift.config import deepspeed, fields
from zerodrift.config.schema import Config
from zerodrift.train.job_file import read_job

JOB: dict[str, Any] = {"model": {"source": "m"}, "data": {"train": "x"}}
READERS: dict[str, Callable[[str], object]] = {
    "config": load,
    "job": read_job,
    "config of a job": lambda path: read_job({**JOB, "config": path}),
    "model": describe,
}


def fifo(folder: Path) -> str:
    os.mkfifo(folder / "pipe.json")
    return str(folder / "pipe.json")


def loop(inside: Path) -> str:
    (inside / "loop.json").symlink_to("loop.json")
    return str(inside / "loop.json")


def printable(error: Exception, most: int) -> bool:
    """Return whether a terminal can show a message, and it is short enough to read."""
    text = str(error)
    return bool(text.encode()) and all(map(str.isprintable, text.split("\n"))) and len(text) < most


NONE: dict[str, Callable[[Path], str]] = {
    "pipe": fifo,
    "folder": str,
    "loop": loop,
    "nothing": lambda inside: str(inside / "nobody" / "here.json"),
    "endless": lambda _: "/dev/zero",
    "long": lambda _: "x" * 5000 + ".json",
    "nul": lambda _: "a\x00b.json",
    "half": lambda _: "half\udcff.json",
    "escape": lambda _: "\x1b[31mred.json",
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", NONE)
@pytest.mark.timeout(30)
def test_what_is_no_file_is_one_error_at_once(kind: str, reader: str, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        READERS[reader](NONE[kind](tmp_path))
    words = {"pipe": "a pipe", "endless": "a device"}
    assert printable(caught.value, 2000) and words.get(kind, "") in str(caught.value)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("part", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(part: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / part)
    with pytest.raises(ModelError):
        describe(tmp_path)


LAUGHS = "a: &a [1, 2, 3]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(20)
)
MERGED = (
    "a: &a {" + ", ".join(f"k{i}: 1" for i in range(3000)) + "}\nb: {<<: [" + ", ".join(["*a"] * 3000) + "]}"
)
YAML: dict[str, str | bytes] = {
    "multiplied": LAUGHS,
    "merged": MERGED,
    "deep lists": "a: " + "[" * 2000 + "]" * 2000,
    "deep blocks": "? " * 300_000,
    "long number": "train_batch_size: " + "9" * 300_000,
    "long key": "x" * 900_000 + ": 1",
    "anchors": "&a " * 300_000,
    "half a character": 'a: "\\ud800"',
    "utf-32": "a: 1".encode("utf-32"),
}
JSON: dict[str, str | bytes] = {
    "deep": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}",
    "long number": '{"train_batch_size": ' + "9" * 900_000 + "}",
}
TEXTS = [
    *((f"a.yaml {name}", "a.yaml", text) for name, text in YAML.items()),
    *((f"a.json {name}", "a.json", text) for name, text in JSON.items()),
]


@pytest.mark.second
@pytest.mark.parametrize(("name", "text"), [case[1:] for case in TEXTS], ids=[case[0] for case in TEXTS])
def test_a_text_that_no_person_writes_is_one_error_at_once(
    name: str, text: str | bytes, tmp_path: Path
) -> None:
    path = write(tmp_path, name, text)
    before = time.process_time()
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert time.process_time() - before < 3
    assert printable(caught.value, 20_000)


ODD_SETS = (
    *("", "a", "=1", "a..b=1", "a[0=1", "a[99999]=1", "a[-1]=1", "[0]=1", "bf16=&a [*a]", "bf16=\ud800"),
    *("bf16=!!python/name:os.system", "precision.rules[0][0]=1", "\x1b[m=1", "train_batch_size=1e999"),
    *("x" * 5000 + "=1", "train_batch_size=" + "9" * 5000),
)


@pytest.mark.parametrize("text", ODD_SETS)
def test_an_odd_override_is_one_error(text: str) -> None:
    for read in (lambda: load({}, [text]), lambda: read_job(JOB, [text])):
        with pytest.raises(ConfigError) as caught:
            read()
        assert printable(caught.value, 5000)


# --- anything whatsoever: a Config, or a ConfigError ------------------------------------------------------

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


def loads_or_says(source: Any, *overrides: str) -> None:
    try:
        config = load(source, overrides)
    except ConfigError as error:
        assert str(error).encode()
    else:
        assert isinstance(config, Config)
        json.dumps([[use.path, use.value, use.status, use.because] for use in config.keys])


@settings(deadline=None, max_examples=50)
@given(st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=5)))
def test_anything_loads_or_is_a_config_error(source: Any) -> None:
    if not (isinstance(source, str) and os.path.exists(source)):
        loads_or_says(source)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


YAML_PIECES = st.one_of(
    st.sampled_from("*&!?|>%@#{}[]:,-'\"~\\\n\t \x00\ufeff\u2028\u00e9"),
    st.sampled_from(["\n  ", ": ", "- ", "<<: ", "&a ", "*a", "!!int ", "!x ", "---\n", "\\U"]),
    st.sampled_from(["bf16", "enabled", "true", "1e-5", "0x", ".nan", "precision", "rules"]),
)
JSON_PIECES = st.one_of(
    st.sampled_from(['{"', '"', '": ', ", ", "}", "[", "]", "1", "-", "e9", "true", "\n", "//"]),
    st.sampled_from(["NaN", "Infinity", "\\ud800", "\\u0000", "bf16"]),
)
PIECES = {"a.yaml": YAML_PIECES, "a.json": JSON_PIECES}


@pytest.mark.parametrize("name", PIECES)
def test_any_text_loads_or_is_a_config_error(name: str, scratch: Path) -> None:
    texts = st.one_of(st.lists(PIECES[name], max_size=14).map("".join), st.text(max_size=20))

    @settings(deadline=None, max_examples=50)
    @given(texts)
    def loads(text: str) -> None:
        loads_or_says(write(scratch, name, text.encode("utf-8", "surrogatepass")))

    loads()
