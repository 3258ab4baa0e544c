"""Everything that a text refers to exists: verbs and options, config keys, `[Note: ...]` essays."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_cli_surface import SURFACE
from zerodrift.config import deepspeed, fields
from zerodrift.config.schema import Config
from zerodrift.train.job_file import every_path

ROOT = Path(__file__).parents[2]

VERB = re.compile(r"(?:^\s*(?:\$ |> )?|`|-m )zerodrift ([a-z]+)([^`\n]*)")
BLOCKS = ("precision", "sharding", "pipeline", "zero_optimization", "torch_autocast", "data_types")
KEY = re.compile(rf"`((?:{'|'.join((*BLOCKS, 'bf16', 'fp16'))})(?:\.[a-z_0-9]+(?:\[\])?)+)(?=[`:=])")
JOB_KEY = re.compile(r"`((?:run|data|model)\.[a-z_0-9]+(?:\.[a-z_]+)?)(?=[`:=])")


def texts(*folders: str) -> Iterator[tuple[str, str]]:
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files += [file for folder in folders for file in sorted((ROOT / folder).rglob("*"))]
    for file in files:
        if file.suffix in ("", ".py", ".md", ".yaml", ".h", ".cpp") and file.is_file():
            yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def wrong_verbs(text: str) -> list[str]:
    """Return the verbs and options that the command line does not have."""
    found = []
    # A string may go on in the next line of a source, and a command on a page.
    for line in re.sub(r'"\s*\n\s*f?"|\\\n\s*', "", text).splitlines():
        for verb, rest in VERB.findall(line):
            if verb not in SURFACE:
                found.append(verb)
                continue
            options = re.findall(r"(?<!\S)(--[a-z][a-z-]*)", rest.partition("#")[0].partition(" -- ")[0])
            found += [f"{verb} {option}" for option in options if option not in SURFACE[verb]]
    return found


PROSE = {"is", "as", "does", "takes", "refuses", "import", "said", "has", "downloads", "checkpoint"}
"""Words after the name in sentences that begin with it, and in Python statements."""


def test_every_verb_and_option_exists() -> None:
    for name, text in texts("src", "docs", "examples"):
        found = [each for each in wrong_verbs(text) if each not in PROSE]
        assert not found, f"{name} names {found}"


@pytest.mark.parametrize(
    "text", ["`zerodrift bench` times", "  zerodrift plan c.yaml --loud", "`zerodrift advise`"]
)
def test_what_does_not_exist_is_seen(text: str) -> None:
    assert wrong_verbs(text)


def keys() -> set[str]:
    ours = {key.path for key in fields.every_key(Config)}
    theirs = {key.removesuffix(".*") for key in deepspeed.ENTRIES}
    known = {*ours, *theirs, *(f"{key}[]" for key in ours)}
    return {*known, *(key.replace("[]", "") for key in known)}


def named_in(text: str) -> set[str]:
    """Return the config keys in a text, without files."""
    found = {key for key in KEY.findall(text) if deepspeed.find(key) is None}
    return {key for key in found if not key.endswith((".json", ".yaml", ".py"))}


def test_every_key_exists() -> None:
    known = keys()
    for name, text in texts("src", "docs", "examples"):
        assert not named_in(text) - known, f"{name} names {named_in(text) - known}"
    known = {key for path in every_path() for key in (path, path.rpartition(".")[0])}
    for name in ("train.md", "job.md"):
        found = set(JOB_KEY.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))) - known
        assert not found, f"{name} names {found}"


MARKS = re.compile(r"^[ \t]*(?://+|#+|\*+)", re.MULTILINE)
HOME = re.compile(r'(?:^|\n\s*\n|""")\s*\[Note: ([^\]]+)\]')
CITED = re.compile(r"\[Note: ([^\]]+)\]")


def test_every_essay_that_is_cited_exists() -> None:
    sources = [
        (name, text)
        for name, text in texts("src", "bench", "tests")
        if name.startswith(("src", "bench", "tests"))
    ]
    written = {" ".join(note.split()) for _, text in sources for note in HOME.findall(MARKS.sub("", text))}
    assert "roots" in written
    for name, text in sources:
        if name == str(Path(__file__).relative_to(ROOT)):
            continue
        lost = {" ".join(note.split()) for note in CITED.findall(text)} - written
        assert not lost, f"{name} cites {lost}"
