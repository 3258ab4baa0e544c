"""Damaged files give the written rows, or an error that names the file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import arrow_stream, parquet
from zerodrift.errors import ConfigError
from zerodrift.train.data import formats
from zerodrift.train.data.rows import read_rows as rows_in

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
    """There are 500 flipped bits, truncations and additions each."""
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


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.arrow"])
def test_half_a_file_is_an_error_wherever_that_shows(name: str, tmp_path: Path) -> None:
    texts = {
        "a.jsonl": LINES,
        "a.json": json.dumps(ROWS, ensure_ascii=False).encode(),
        "a.csv": ("text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in ROWS)).encode(),
    }
    whole = texts.get(name) or arrow_stream(ROWS, 20)
    wanted = [{key: str(held) for key, held in row.items()} for row in ROWS] if name == "a.csv" else ROWS
    file = tmp_path / name
    file.write_bytes(whole)
    assert rows(file) == wanted
    for at in range(1, len(whole) - 1, 13):
        file.write_bytes(whole[:at])
        try:
            found = rows(file)
        except ConfigError as error:
            assert name in str(error)
        else:  # between two rows; of the last cell of a CSV nobody knows how long it was
            cut = found[:-1] if name == "a.csv" and whole[at - 1 : at] != b"\n" else found
            assert name in ("a.jsonl", "a.csv") and cut == wanted[: len(cut)]


@pytest.mark.parametrize("kind", ["json", "jsonl", "csv"])
def test_a_file_is_read_piece_by_piece(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"large.{kind}"
    text = "long " * 200
    with file.open("w") as out:
        out.write({"json": "[", "csv": "text,n\n"}.get(kind, ""))
        for number in range(8000):
            row = json.dumps({"text": text, "n": number})
            out.write(f"{text},{number}\n" if kind == "csv" else row + "\n" * (kind == "jsonl"))
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
        ("a.csv", "text,n\nNA,1\n007,2\n", [{"text": "NA", "n": "1"}, {"text": "007", "n": "2"}]),
        ("a.jsonl", '{"text": "2020-01-01T00:00:00Z"}\n', [{"text": "2020-01-01T00:00:00Z"}]),
        ("a.jsonl", '{"text": "a"}\n{"other": "b"}\n', [{"text": "a"}, {"other": "b"}]),
    ],
)
def test_a_text_is_what_is_written(
    tmp_path: Path, name: str, content: str, read: list[dict[str, str]]
) -> None:
    """`datasets` reads None, a number, a time and another key here, so zerodrift reads by itself."""
    (tmp_path / name).write_text(content)
    assert rows(tmp_path / name) == read
