"""Every key of DeepSpeed is in the table, which `load` obeys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.refusals import refusal
from zerodrift.config import deepspeed
from zerodrift.config.deepspeed import ENTRIES, Entry
from zerodrift.config.loader import load
from zerodrift.errors import ConfigError

KEYS = Path(__file__).parent / "data" / "deepspeed_keys.txt"
EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "deepspeed").iterdir())


def facts() -> list[str]:
    """Return every key path that DeepSpeed reads, from a list of its source."""
    return [line for line in KEYS.read_text().splitlines() if line and not line.startswith("#")]


def nested(key: str, value: Any) -> dict[str, Any]:
    """Return a config with one dotted key, and the required keys of its block."""
    needed = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}}
    first, *inner = key.split(".")
    for name in reversed(inner):
        value = {name: value}
    return {first: {**needed.get(first, {}), **value} if inner else value}


# --- complete ---------------------------------------------------------------------------------------


def test_every_key_of_deepspeed_is_in_the_table_and_known_to_load() -> None:
    """Each key loads with null, or is part of a block that is refused as a whole."""
    free = ("optimizer.params", "scheduler.params")
    assert len(facts()) == len(set(facts())) > 400
    assert all(deepspeed.find(f"{key}.anything") for key in free)
    for key in facts():
        assert deepspeed.find(key) is not None or key in free
        try:
            assert load(nested(key, None)).keys, key
        except ConfigError as error:
            assert "must be a key of" not in str(error), key


# --- obeyed -----------------------------------------------------------------------------------------

REFUSED = [entry for entry in ENTRIES.values() if entry.fate == "refused"]
IGNORED = [entry for entry in ENTRIES.values() if entry.fate == "ignored"]


def asking(entry: Entry) -> Any:
    """Return a value with which a refused key has an effect."""
    if True in entry.harmless and not any(value == 1 and value is not True for value in entry.harmless):
        return False
    return next(value for value in (True, 8, "cpu") if value not in entry.harmless or value is True)


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.key)
def test_a_refused_key_is_refused_where_it_asks_for_something_and_ignored_elsewhere(entry: Entry) -> None:
    value = asking(entry)
    message = refusal(nested(entry.key, value))
    assert message.startswith(f"config: `{entry.key}`: must be ")
    assert entry.text in message and entry.instead in message
    assert f"got {json.dumps(value)}" in message.replace("'", '"')
    for value in (None, "auto", *entry.harmless):
        (use,) = [use for use in load(nested(entry.key, value)).keys if use.path == entry.key]
        assert use.status == "ignored"
        assert use.because.startswith("off, as here: ") and entry.text in use.because


def test_an_ignored_key_is_listed_with_its_reason() -> None:
    for entry in IGNORED:
        path = entry.key.removesuffix("*") + "anything" if entry.key.endswith(".*") else entry.key
        for value in (True, 5e8, [1, {"a": 2}]):
            (use,) = [use for use in load(nested(path, value)).keys if use.path == path]
            assert (use.status, use.because, use.value) == ("ignored", entry.text, value)


def test_one_and_true_are_not_the_same() -> None:
    key = "tensor_parallel.autotp_size"
    with pytest.raises(ConfigError, match=key):
        load(nested(key, True))
    assert load(nested(key, 1)).keys[0].status == "ignored"
    with pytest.raises(ConfigError, match="sparse_gradients"):
        load({"sparse_gradients": 0})
    off = load({"amp": {"enabled": False, "opt_level": "O1"}})
    assert [use.status for use in off.keys] == ["ignored", "ignored"], (
        "what stands beside a switch follows it"
    )
    with pytest.raises(ConfigError, match=r"^(?!.*opt_level)"):
        load({"amp": {"enabled": True, "opt_level": "O1"}})


def test_a_block_is_refused_as_a_whole_and_must_be_one() -> None:
    with pytest.raises(ConfigError, match=r"^config: `zero_optimization\.zenflow`: must be false: "):
        load({"zero_optimization": {"zenflow": {"topk_ratio": 0.1, "overlap_step": True}}})
    for key in ("aio", "amp", "zero_optimization.offload_param", "activation_checkpointing"):
        with pytest.raises(ConfigError, match="must be a block of keys; got 3"):
            load(nested(key, 3))
        for nothing in (None, {}):
            assert load(nested(key, nothing)).keys[0].status == "ignored"


# --- what users copy --------------------------------------------------------------------------------


def leaves(value: Any, path: str = "") -> Iterator[str]:
    """Yield every written key that holds no block, without the code under test."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_loads_with_every_key_accounted_for(path: Path) -> None:
    config = load(path)
    assert [use.path for use in config.keys] == list(leaves(json.loads(path.read_text())))
    assert {use.status for use in config.keys} <= {"used", "ignored"}
    assert "used" in {use.status for use in config.keys}
