"""The two pages about keys are fresh, and the words they share with messages are right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from tests.unit.tools import load_tool
from zerodrift.config import fields
from zerodrift.config.loader import load
from zerodrift.config.schema import Config, Flag, Positive, Reduce, Wire
from zerodrift.policy.decisions import COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
reference = load_tool("config_page")
PAGES = {"config.md": reference.render_config, "deepspeed.md": reference.render_page}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_fresh_and_its_tables_are_whole(name: str) -> None:
    text = (DOCS / name).read_text()
    assert PAGES[name]() in text, "run `make docs`"
    for line in PAGES[name]().splitlines():
        if line.startswith("|"):
            assert line.endswith("|") and line.count("|") == 4, line


def test_the_config_page_shows_every_key_once() -> None:
    page = reference.render_config()
    shown = re.findall(r"^\| `(\w+)` \|", page, flags=re.MULTILINE)
    keys = [
        key.path.rpartition(".")[2]
        for key in fields.every_key(Config)
        if not key.path.startswith("precision.rules[].reduce.")
        and not (key.path.startswith("precision.rules[].") and key.path.rpartition(".")[2] in COLUMNS)
        and ("." in key.path or not fields.block_of(key.kind))
    ]
    assert sorted(shown) == sorted(keys)


def test_the_yaml_on_the_page_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (DOCS / "config.md").read_text(), flags=re.DOTALL)
    (tmp_path / "a.yaml").write_text(text)
    config = load(tmp_path / "a.yaml")
    assert len(config.precision.rules) == 3 and config.zero_optimization.stage == 3


def test_every_key_has_a_docstring_and_words() -> None:
    for key in fields.every_key(Config):
        assert key.doc.endswith("."), key.path
        assert fields.admits(key.kind), key.path


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Flag | None, "true or false"),
        (Positive | Literal["auto"] | None, 'a whole number above 0 or "auto"'),
        (Annotated[int, Field(ge=0, le=3)], "0, 1, 2 or 3"),
        (Annotated[float, Field(ge=0.5, le=9.0)], "a number from 0.5 to 9.0"),
        (int, "a whole number"),
        (
            Wire | Reduce | None,
            "fp32, bf16, fp16, fp8, mxfp8, int8, e5m2-128, int4, int4-64-bf16 or a block of keys",
        ),
        (tuple[str, ...], "a list of strings"),
        (dict[str, Any], "a block of arguments"),
    ],
)
def test_the_words_for_a_type(kind: Any, words: str) -> None:
    assert fields.admits(kind) == words


@pytest.mark.parametrize("kind", [bytes, tuple[bytes, ...]])
def test_a_type_without_words_is_a_mistake_of_ours(kind: Any) -> None:
    with pytest.raises(AssertionError, match="no words"):
        fields.admits(kind)


def test_paths_lead_to_types() -> None:
    assert fields.kind_at(("precision", "rules", 0, "reduce", "wire"), Config) == Wire | None
    assert fields.kind_at(("precision", "nothing"), Config) is None
    assert fields.kind_at(("backend", "nothing"), Config) is None
    assert fields.kind_at((), Config) is Config
