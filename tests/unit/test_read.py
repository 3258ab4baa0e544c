"""What `load` reads: JSON, YAML and dicts, and every way in which they can be no config at all."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.unit.refused import said, write
from zerodrift.config.load import load
from zerodrift.config.parser import MAX_BYTES
from zerodrift.config.plain_tree import MAX_DEPTH, MAX_VALUES
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


def test_json_yaml_and_dict_give_the_same_config(tmp_path: Path) -> None:
    from_dict = load(BOTH)
    assert from_dict == load(write(tmp_path, "a.json", json.dumps(BOTH)))
    assert from_dict == load(str(write(tmp_path, "a.yaml", AS_YAML)))
    assert from_dict == load(write(tmp_path, "a.YML", AS_YAML))
    assert from_dict.zero_optimization.stage == 3
    assert from_dict.precision.rules[0].pin is DType.FP32


def test_a_file_without_a_telling_suffix_is_read_as_what_it_looks_like(tmp_path: Path) -> None:
    assert load(write(tmp_path, "config", json.dumps(BOTH))) == load(write(tmp_path, "other.txt", AS_YAML))


def test_a_byte_order_mark_is_no_part_of_the_config(tmp_path: Path) -> None:
    for name, text in (("a.json", json.dumps(BOTH)), ("a.yaml", AS_YAML)):
        assert load(write(tmp_path, name, b"\xef\xbb\xbf" + text.encode())) == load(BOTH)


def test_any_mapping_will_do_and_is_copied() -> None:
    source = OrderedDict(optimizer=MappingProxyType({"type": "SGD", "params": {"lr": [0.1]}}))
    config = load(source)
    source["optimizer"]["params"]["lr"].append(3)
    assert config.optimizer is not None and config.optimizer.params == {"lr": [0.1]}


def test_the_source_is_not_changed() -> None:
    source = copy.deepcopy(BOTH)
    load(source, ["zero_optimization.stage=1", "bf16.enabled=false"])
    assert source == BOTH


def test_a_config_passes_through_but_not_with_overrides() -> None:
    config = load(BOTH)
    assert load(config) is config
    assert "must come with the file or dict" in said(config, "bf16.enabled=false")


def test_an_empty_dict_is_a_config_that_decides_nothing() -> None:
    assert load({}) == load(Config())


# --- files that cannot be read ----------------------------------------------------------------------


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, "ds_config.json", "{}")
    assert load(tmp_path / "ds_config.json") == load(Config())
    message = said(tmp_path / "ds_confg.json")
    assert "ds_confg.json`: must exist; got no such file" in message
    assert "ds_config.json`?" in message
    assert "must exist" in said(tmp_path / "nowhere" / "a.json")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    path = write(tmp_path, "a.json", "{}")
    monkeypatch.setattr("builtins.open", refuse)
    assert "a.json`: must be readable; got Permission denied" in said(path)


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    assert "must be UTF-8 text; got byte 0xff at offset 2" in said(write(tmp_path, "a.json", b'{"\xff": 1}'))
    assert "must be UTF-8 text" in said(write(tmp_path, "a.yaml", "stage: 1".encode("utf-16")))


@pytest.mark.parametrize("text", ["", " \n\t\n"])
@pytest.mark.parametrize("name", ["a.json", "a.yaml", "a"])
def test_an_empty_file(tmp_path: Path, name: str, text: str) -> None:
    assert f"{name}`: must hold a config; got an empty file" in said(write(tmp_path, name, text))


def test_a_file_of_comments_holds_no_config(tmp_path: Path) -> None:
    assert "must hold a block of keys at its top; got nothing" in said(write(tmp_path, "a.yaml", "# bf16\n"))


@pytest.mark.parametrize(
    ("name", "text"), [("a.json", "[1]"), ("a.yaml", "- 1"), ("a.json", "3"), ("a.yaml", "x")]
)
def test_the_top_must_be_a_block(tmp_path: Path, name: str, text: str) -> None:
    assert f"{name}`: must hold a block of keys at its top" in said(write(tmp_path, name, text))


def test_a_huge_file_is_not_a_config(tmp_path: Path) -> None:
    path = write(tmp_path, "a.json", b" " * (MAX_BYTES + 1))
    assert "must be a config of at most 1,000,000 bytes" in said(path)


@pytest.mark.parametrize("source", [3, [], b"a.json", object(), {"a"}, 1.5])
def test_what_is_neither_path_nor_dict(source: Any) -> None:
    assert said(source).startswith("`config`: must be a path or a dict; got ")


def test_json_text_is_not_a_path() -> None:
    assert "got a text that looks like JSON" in said('{"bf16": {"enabled": true}}')


# --- syntax -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{\n  "bf16": {"enabled": true}\n  "fp16": {}\n}', "Expecting ',' delimiter at line 3, column 3"),
        ('{\n  // speed\n  "bf16": {}\n}', "at line 2, column 3. JSON has no comments"),
        ('{"bf16": {"enabled": True}}', "at line 1, column 22. JSON spells these true, false and null."),
        ("{'bf16': 1}", "at line 1, column 2. JSON strings take double quotes."),
        ('{"bf16": {"enabled": true,}}', "JSON has no comma before a closing bracket"),
        ('{"a": 1', "at line 1, column 8"),
        ('{"a": 1} {"b": 2}', "Extra data at line 1, column 10"),
    ],
)
def test_bad_json_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    message = said(write(tmp_path, "a.json", text))
    assert "a.json`: must be valid JSON; got " in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16:\n  enabled: true\n fp16: 1\n", "at line 3, column"),
        ("bf16: {enabled: true\n", "at line 2, column 1"),
        ("a: b: c\n", "at line 1, column 5"),
        ("bf16:\n\tenabled: true\n", "at line 2, column 1. Indent with spaces."),
        ("a: *nobody\n", "undefined alias 'nobody' at line 1, column 4"),
        ("a: 1\n---\nb: 2\n", "at line 2, column 1"),
        ("a: \x07\n", "a character that YAML forbids at line 1, column 4"),
        ('a: "\\UFFFFFFFF"\n', "must be valid YAML"),
    ],
)
def test_bad_yaml_is_told_with_its_place(tmp_path: Path, text: str, expected: str) -> None:
    message = said(write(tmp_path, "a.yaml", text))
    assert "a.yaml`: must be" in message
    assert expected in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: !!python/object:os.system x\n", "must be plain values, lists and blocks; got the tag"),
        ("a: !mine 3\n", "got the tag '!mine' at line 1, column 4"),
        ("a: !!set {b}\n", "got the tag"),
        ("a: !!binary aGk=\n", "got the tag"),
        ("? [a, b]\n: 1\n", "must have strings as keys; got a list or a block as key at line 1, column 3"),
        ("&a [*a]\n", "must not contain itself"),
        ("a: &b {c: *b}\n", "must not contain itself"),
        ("<<: 3\na: 1\n", "must merge blocks"),
        ("a: !!int bf16\n", "must hold a value of its tag int"),
    ],
)
def test_yaml_that_is_more_than_values(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in said(write(tmp_path, "a.yaml", text))


def test_yaml_values_are_what_a_person_expects(tmp_path: Path) -> None:
    """YAML 1.1 would make these a string, an octal, a base-60 number, booleans and a date."""
    text = """
optimizer:
  type: AdamW
  params:
    lr: 1e-5
    eps: 1.0E-08
    weight_decay: .1
    octal: 010
    hex: 0x10
    clock: 1:30
    switch: on
    answer: no
    date: 2026-01-31
    tilde: ~
    quoted: "1e-5"
    tagged: !!str 5
    flag: True
    grouped: 1_000
"""
    config = load(write(tmp_path, "a.yaml", text))
    assert config.optimizer is not None
    assert config.optimizer.params == {
        "lr": 1e-5,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "octal": 10,
        "hex": 16,
        "clock": "1:30",
        "switch": "on",
        "answer": "no",
        "date": "2026-01-31",
        "tilde": None,
        "quoted": "1e-5",
        "tagged": "5",
        "flag": True,
        "grouped": "1_000",
    }


def test_yaml_words_that_are_no_booleans_say_what_to_write(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "bf16: {enabled: yes}\n")
    message = said(path)
    assert "`bf16.enabled`: must be true, false or \"auto\"; got 'yes'. Write true without quotes." in message
    assert load(write(tmp_path, "b.yaml", "bf16: {enabled: true}\n")).bf16 is not None


def test_yaml_anchors_and_merges(tmp_path: Path) -> None:
    text = """
precision:
  rules:
    - &pin {match: "*.router.*", pin: fp32}
    - {<<: *pin, match: "*.norm.*"}
    - <<: [*pin, {output: input, match: x}]
      match: "*.head.*"
"""
    rules = load(write(tmp_path, "a.yaml", text)).precision.rules
    assert [rule.match for rule in rules] == ["*.router.*", "*.norm.*", "*.head.*"]
    assert [rule.pin for rule in rules] == [DType.FP32] * 3
    assert [rule.output for rule in rules] == [None, None, "input"]


def test_a_key_written_twice(tmp_path: Path) -> None:
    twice = '{"bf16": {"enabled": true, "enabled": false}, "fp16": {"enabled": true}, "fp16": {}}'
    for name in ("a.json", "a.yaml"):
        message = said(write(tmp_path, name, twice))
        assert "`fp16`: must be written once; got two of them" in message
        assert "`bf16.enabled`: must be written once; got two of them" in message
    assert load(write(tmp_path, "b.json", '{"bf16": {"enabled": true}}')).bf16 is not None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(tmp_path: Path, value: str) -> None:
    message = said(write(tmp_path, "a.json", f'{{"gradient_clipping": {value}}}'))
    assert "`gradient_clipping`: must be a finite number" in message


def test_infinity_silences_the_log_and_nothing_else(tmp_path: Path) -> None:
    assert load({"steps_per_print": float("inf")}).steps_per_print == 0
    assert load(write(tmp_path, "a.json", '{"steps_per_print": Infinity}')).steps_per_print == 0
    assert "finite" in said({"steps_per_print": float("-inf")})


def test_a_number_that_no_machine_word_holds(tmp_path: Path) -> None:
    assert "`train_batch_size`: must fit in 64 bits; got a number of 1329 bits" in said(
        {"train_batch_size": 10**400}
    )
    for name in ("a.json", "a.yaml"):
        assert "must fit in 64 bits" in said(write(tmp_path, name, f'{{"train_batch_size": {"9" * 5000}}}'))
    assert load({"train_batch_size": 2**62}).train_batch_size == 2**62


def test_trees_without_end_or_measure(tmp_path: Path) -> None:
    itself: dict[str, Any] = {}
    itself["zero_optimization"] = itself
    assert f"must be at most {MAX_DEPTH} levels deep" in said(itself)
    long = {"optimizer": {"type": "x", "params": {"a": [1] * 20_000}}}
    assert f"must be at most {MAX_VALUES:,} values" in said(long)
    for name, text in (("a.json", "[" * 100_000), ("a.yaml", "[" * 5000), ("b.json", '{"a":' * 50_000)):
        assert "nested" in said(write(tmp_path, name, text)) or "valid" in said(tmp_path / name)
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 20))
    assert "must be at most" in said(write(tmp_path, "laughs.yaml", laughs))


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ({1: 2}, "`config`: must have strings as keys; got 1"),
        ({"bf16": {None: 2}}, "`bf16`: must have strings as keys; got null"),
        ({"gradient_clipping": {1.0}}, "`gradient_clipping`: must be a string, a number"),
        ({"sharding": {"units": [Path("x")]}}, "`sharding.units[0]`: must be a string, a number"),
        ({"gradient_clipping": "\ud800"}, "`gradient_clipping`: must be valid Unicode"),
        ({"\ud800": 1}, "`['\\ud800']`: must be valid Unicode"),
        ({"a b": 1}, "`['a b']`: must be a key"),
        ({"": 1}, "`['']`: must be a key"),
    ],
)
def test_what_no_file_could_hold(source: Any, where: str) -> None:
    message = said(source)
    assert where in message
    message.encode()
