"""Damaged files: the rows that were written, or an error that names the file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import parquet
from zerodrift.errors import ConfigError
from zerodrift.train.data import formats
from zerodrift.train.data.formats import read_rows as rows_in

ROWS = [{"text": f"row {number} of some length, with Übung", "n": number} for number in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


def rows(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in rows_in(file, formats.format_of(file))]


PACKED = {
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.parquet": lambda: parquet(ROWS, write_page_checksum=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_every_damage_that_a_checksum_shows_is_an_error(name: str, tmp_path: Path) -> None:
    """Bits, halves and additions: 500 of each kind."""
    whole = PACKED[name]()
    file, draw, caught = tmp_path / name, np.random.default_rng(0), 0
    for turn in range(500):
        at = int(draw.integers(len(whole)))
        damaged = {
            0: whole[:at],
            1: whole[:at] + bytes(draw.bytes(8)) + whole[at:],
            2: whole + whole[:at],
        }.get(turn % 10, whole[:at] + bytes([whole[at] ^ 1 << int(draw.integers(8))]) + whole[at + 1 :])
        file.write_bytes(damaged)
        try:
            found = rows(file)
        except ConfigError as error:
            assert name in str(error)
            caught += 1
        else:
            # What a footer of parquet calls a column has no checksum.
            assert [[*row.values()] for row in found] == [[*row.values()] for row in ROWS], turn
    assert caught > 350


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_half_a_file_is_an_error_wherever_that_shows(name: str, tmp_path: Path) -> None:
    whole = LINES if name == "a.jsonl" else json.dumps(ROWS, ensure_ascii=False).encode()
    file = tmp_path / name
    file.write_bytes(whole)
    assert rows(file) == ROWS
    for at in range(1, len(whole) - 1, 13):
        file.write_bytes(whole[:at])
        try:
            found = rows(file)
        except ConfigError as error:
            assert name in str(error)
        else:  # between two rows
            assert name == "a.jsonl" and found == ROWS[: len(found)]


@pytest.mark.parametrize("kind", ["json", "jsonl"])
def test_a_file_is_read_piece_by_piece(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"large.{kind}"
    text = "long " * 200
    with file.open("w") as out:
        out.write("[" * (kind == "json"))
        for number in range(8000):
            out.write(json.dumps({"text": text, "n": number}) + "\n" * (kind == "jsonl"))
            out.write(", " if kind == "json" and number < 7999 else "")
        out.write("]" if kind == "json" else "")
    assert file.stat().st_size > 8e6
    tracemalloc.start()
    assert sum(len(row["text"]) for _, row in rows_in(file, formats.format_of(file))) == 8000 * len(text)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1.5e6


@pytest.mark.parametrize(
    ("name", "content", "read"),
    [
        ("a.jsonl", '{"text": "2020-01-01T00:00:00Z"}\n', [{"text": "2020-01-01T00:00:00Z"}]),
        ("a.jsonl", '{"text": "a"}\n{"other": "b"}\n', [{"text": "a"}, {"other": "b"}]),
    ],
)
def test_a_text_is_what_is_written(
    tmp_path: Path, name: str, content: str, read: list[dict[str, str]]
) -> None:
    """`datasets` reads None, a number, a time and a key more: the reason why it does not read for us."""
    (tmp_path / name).write_text(content)
    assert rows(tmp_path / name) == read
