"""`load` reads JSON, YAML and dicts, and refuses everything that is no config."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.unit.refusals import refusal, write
from zerodrift.config.loader import load
from zerodrift.config.parser import MAX_BYTES
from zerodrift.config.plain_tree import MAX_DEPTH
from zerodrift.config.schema import Config
from zerodrift.dtypes import DType

# --- sources ----------------------------------------------------------------------------------------

BOTH = {
    "precision": {"accumulate": "fp32", "rules": [{"match": "*.router.*", "pin": "fp32"}]},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
}

AS_YAML = """
precision:
  accumulate: fp32
  rules:
    - match: "*.router.*"
      pin: fp32
bf16: {enabled: true}
zero_optimization:   # a comment
  stage: 3
  overlap_comm: true
"""


AS_JSON = json.dumps(BOTH)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", AS_JSON),
        ("a.yaml", AS_YAML),
        ("no_suffix", AS_JSON),
        ("b.txt", AS_YAML),
        ("marked.json", "\ufeff" + AS_JSON),
        ("marked.yaml", "\ufeff" + AS_YAML),
    ],
)
def test_json_yaml_and_dict_give_the_same_config(name: str, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, text)
    found = load(path)
    assert found == load(str(path)) == load(BOTH)
    assert found.zero_optimization.stage == 3 and found.precision.rules[0].pin is DType.FP32
    before = copy.deepcopy(BOTH)
    load(MappingProxyType(BOTH), ["zero_optimization.stage=1", "bf16.enabled=false"])
    assert before == BOTH, "left as it is"


# --- files that cannot be read ----------------------------------------------------------------------


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "ds_config.json", "{}")
    assert load(tmp_path / "ds_config.json") == load(Config())
    message = refusal(tmp_path / "ds_confg.json")
    assert "ds_confg.json`: must exist; got no such file" in message
    assert "ds_config.json`?" in message
    assert "must exist" in refusal(tmp_path / "nowhere" / "a.json")


BLOCK_AT_TOP = "must hold a block of keys at its top"
JSON, YAML = "must be valid JSON; got ", "must be"
NO_FILE_OF_A_CONFIG: list[tuple[str, str | bytes, str, str]] = [
    ("a.json", b'{"\xff": 1}', "must be UTF-8 text; got byte 0xff at offset 2", ""),
    ("a.yaml", " \n\t\n", "must hold a config; got an empty file", ""),
    ("a.yaml", "# bf16\n", f"{BLOCK_AT_TOP}; got nothing", ""),
    ("a.json", "[1]", BLOCK_AT_TOP, ""),
    ("a.json", b" " * (MAX_BYTES + 1), "must be a config of at most 1,000,000 bytes", ""),
    ("a.json", '{\n  "bf16": {}\n  "fp16": {}\n}', JSON, "Expecting ',' delimiter at line 3, column 3"),
    ("a.json", '{"bf16": {"enabled": True}}', JSON, "column 22. JSON spells these true, false and null."),
    ("a.json", '{"bf16": {"enabled": true,}}', JSON, "JSON has no comma before a closing bracket"),
    ("a.json", '{"gradient_clipping": NaN}', "", "`gradient_clipping`: must be a finite number"),
    ("a.json", '{"gradient_clipping": 1e999}', "", "`gradient_clipping`: must be a finite number"),
    ("a.yaml", "bf16: {enabled: yes}\n", "", "or \"auto\"; got 'yes'. Write true without"),
    ("a.yaml", "bf16:\n\tenabled: true\n", YAML, "at line 2, column 1. Indent with spaces."),
    ("a.yaml", "a: *nobody\n", YAML, "undefined alias 'nobody' at line 1, column 4"),
    ("a.yaml", "a: 1\n---\nb: 2\n", YAML, "at line 2, column 1"),
    ("a.yaml", "a: !!python/object:os.system x\n", "must be plain values, lists and blocks; got the tag", ""),
    ("a.yaml", "a: &b {c: *b}\n", "", "must not contain itself"),
    ("a.yaml", "a: !!int bf16\n", "", "must hold a value of its tag int"),
]


@pytest.mark.parametrize(("name", "text", "must", "place"), NO_FILE_OF_A_CONFIG)
def test_a_file_that_is_no_config_is_told_with_its_place(
    name: str, text: str | bytes, must: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hjson", None)
    message = refusal(write(tmp_path, name, text))
    assert (f"{name}`: {must}" if must else name) in message and place in message


AS_A_PERSON_EXPECTS = {
    "1e-5": 1e-5,
    "1.0E-08": 1e-8,
    ".1": 0.1,
    "010": 10,
    "0x10": 16,
    "1:30": "1:30",
    "on": "on",
    "no": "no",
    "2026-01-31": "2026-01-31",
    "~": None,
    '"1e-5"': "1e-5",
    "!!str 5": "5",
    "True": True,
    "1_000": "1_000",
}
"""Values that YAML 1.1 would make a string, an octal, a base-60 number, booleans and a date."""


def test_yaml_values_are_what_a_person_expects(tmp_path: Path) -> None:
    lines = "".join(f"    k{number}: {text}\n" for number, text in enumerate(AS_A_PERSON_EXPECTS))
    config = load(write(tmp_path, "a.yaml", f"optimizer:\n  type: AdamW\n  params:\n{lines}"))
    assert config.optimizer is not None
    assert list(config.optimizer.params.values()) == list(AS_A_PERSON_EXPECTS.values())


def test_yaml_anchors_and_merges(tmp_path: Path) -> None:
    text = """
precision:
  rules:
    - &pin {match: "*.router.*", pin: fp32}
    - {<<: *pin, match: "*.norm.*"}
    - <<: [*pin, {output: input, match: x}]
"""
    rules = load(write(tmp_path, "a.yaml", text)).precision.rules
    assert [rule.match for rule in rules] == ["*.router.*", "*.norm.*", "*.router.*"]
    assert [rule.pin for rule in rules] == [DType.FP32] * 3
    assert [rule.output for rule in rules] == [None, None, "input"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{\n  // two\n  "steps_per_print": 2, /* so */\n}'),
        ("a.hjson", "// no braces\nsteps_per_print: 2"),
    ],
)
def test_hjson_is_read_wherever_its_package_is(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hjson")
    path = write(tmp_path, name, text)
    assert load(path).steps_per_print == 2
    twice = refusal(write(tmp_path, "b.json", '{"bf16": {} // so\n "bf16": {}}'))
    assert "`bf16`: must be written once" in twice
    monkeypatch.setitem(sys.modules, "hjson", None)
    assert "must be valid JSON" in refusal(path) and "pip install 'zerodrift[hjson]'" in refusal(path)


def test_a_key_written_twice(tmp_path: Path) -> None:
    twice = '{"bf16": {"enabled": true, "enabled": false}, "fp16": {"enabled": true}, "fp16": {}}'
    for name in ("a.json", "a.yaml"):
        message = refusal(write(tmp_path, name, twice))
        assert "`fp16`: must be written once; got two of them" in message
        assert "`bf16.enabled`: must be written once; got two of them" in message
    assert load(write(tmp_path, "b.json", '{"bf16": {"enabled": true}}')).bf16 is not None


@pytest.mark.parametrize(
    ("source", "where"),
    [
        *((source, "`config`: must be a path or a dict; got ") for source in (3, [], b"a.json")),
        ('{"bf16": {}}', "`config`: must be a path or a dict; got a text that looks like JSON"),
        ({"train_batch_size": 10**400}, "`train_batch_size`: must fit in 64 bits; got a number of 1329 bits"),
        ({"steps_per_print": float("-inf")}, "`steps_per_print`: must be a finite number"),
        ({1: 2}, "`config`: must have strings as keys; got 1"),
        ({"gradient_clipping": {1.0}}, "`gradient_clipping`: must be a string, a number"),
        ({"sharding": {"units": [Path("x")]}}, "`sharding.units[0]`: must be a string, a number"),
        ({"\ud800": 1}, "`['\\ud800']`: must be valid Unicode"),
        ({"backend": "a\0"}, "`backend`: must be valid Unicode without NUL; got 'a\\x00'"),
        ({"": 1}, "`['']`: must be a key"),
    ],
)
def test_what_no_file_could_hold(source: Any, where: str) -> None:
    assert where in refusal(source)
    itself: dict[str, Any] = {}
    itself["zero_optimization"] = itself
    assert f"must be at most {MAX_DEPTH} levels deep" in refusal(itself)
