"""Damaged files, token maps and caches give the written rows and blocks, or an error that names the file."""

from __future__ import annotations

import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import TALK, arrow_stream, data, jsonl, made, parquet, parts_of, stream
from zerodrift.errors import ConfigError
from zerodrift.train.data import documents, formats
from zerodrift.train.data.blocks import INDEX
from zerodrift.train.data.prepare import PreparedData
from zerodrift.train.data.rows import read_rows as rows_in
from zerodrift.train.data.tokenizer import ByteTokenizer

WRITTEN = [{"text": f"row {number} of some length, with Übung", "n": number} for number in range(60)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in WRITTEN).encode()


def rows(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in rows_in(file, formats.format_of(file))]


PACKED = {
    "a.jsonl.gz": lambda: gzip.compress(LINES),
    "a.parquet": lambda: parquet(WRITTEN, write_page_checksum=True),
}


@pytest.mark.parametrize("name", PACKED)
def test_every_damage_that_a_checksum_shows_is_an_error(name: str, tmp_path: Path) -> None:
    """There are 100 flipped bits, truncations and additions each."""
    whole = PACKED[name]()
    file, draw, caught = tmp_path / name, np.random.default_rng(0), 0
    for turn in range(100):
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
            assert [[*row.values()] for row in found] == [[*row.values()] for row in WRITTEN], turn
    assert caught > 70


HALVED: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: LINES,
    "a.json": lambda: json.dumps(WRITTEN, ensure_ascii=False).encode(),
    "a.csv": lambda: ("text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in WRITTEN)).encode(),
    "a.arrow": lambda: arrow_stream(WRITTEN, 20),
}


@pytest.mark.parametrize("name", HALVED)
def test_half_a_file_is_an_error_wherever_that_shows(name: str, tmp_path: Path) -> None:
    whole, file = HALVED[name](), tmp_path / name
    file.write_bytes(whole)
    wanted = rows(file)
    assert [list(map(str, row.values())) for row in wanted] == [
        [row["text"], str(row["n"])] for row in WRITTEN
    ]
    for at in range(1, len(whole) - 1, 67):
        file.write_bytes(whole[:at])
        try:
            found = rows(file)
        except ConfigError as error:
            assert name in str(error)
        else:  # between two rows; of the last cell of a CSV nobody knows how long it was
            cut = found[:-1] if name == "a.csv" and whole[at - 1 : at] != b"\n" else found
            assert name in ("a.jsonl", "a.csv") and cut == wanted[: len(cut)]


def test_a_text_is_what_is_written(tmp_path: Path) -> None:
    """`datasets` reads None, a number, a time and another key here, so zerodrift reads by itself."""
    (tmp_path / "a.csv").write_text("text,n\nNA,1\n007,2\n")
    assert rows(tmp_path / "a.csv") == [{"text": "NA", "n": "1"}, {"text": "007", "n": "2"}]
    written = [{"text": "2020-01-01T00:00:00Z"}, {"other": "b"}]
    assert rows(jsonl(tmp_path / "a.jsonl", written)) == written


# --- token maps ---------------------------------------------------------------------------------------


def numbers(file: Path, values: np.ndarray) -> Path:
    np.save(file, values) if file.suffix == ".npy" else values.tofile(file)
    return file


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


FEW = np.arange(640) % 250
TOKENS = FEW.astype(np.uint16)


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_maps_are_used_as_they_lie(tmp_path: Path, kind: str) -> None:
    flat = TOKENS[:70]
    file = numbers(tmp_path / f"tokens.{kind}", flat)
    parts = made(tmp_path, data(file, validation=0.25))
    assert parts.sets[0].counts.kind == "tokens" and parts.validation is not None
    assert stream(parts.train).tolist() == flat[:48].tolist()
    assert stream(parts.validation).tolist() == flat[48:64].tolist()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("a.npy", FEW - 1, "none below 0; got -1 to 14"),
        ("a.npy", FEW * 1.0, "one row of whole numbers; got float64"),
        ("a.npy", FEW.reshape(20, 32), "one row of whole numbers"),
        ("a.bin", FEW.astype(np.uint32), "in every second place.*token_dtype: uint32"),
    ],
)
def test_other_numbers_are_refused(name: str, values: np.ndarray, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, data(numbers(tmp_path / name, values)))


def test_a_damaged_header_is_an_error(tmp_path: Path) -> None:
    """Another length is an error; a flipped bit is one, or leaves the written numbers."""
    file = numbers(tmp_path / "a.npy", TOKENS)
    before, whole = file.read_bytes(), stream(made(tmp_path, data(file)).train)
    for content in (before[:6], before[:60], before[:200], before[:-7], before + b"12345", b""):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"a\.npy"):
            made(tmp_path, data(file))
    caught = 0
    for at, bit in itertools.product(range(0, 128, 3), range(0, 8, 3)):
        file.write_bytes(flipped(before, at, bit))
        try:
            found = stream(made(tmp_path, data(file)).train)
        except ConfigError as error:
            assert "a.npy" in str(error)
            caught += 1
        else:
            assert np.array_equal(found, whole) or at < 60, at
    assert caught > 50


def test_a_token_that_the_model_does_not_know_is_named_where_it_is_read(tmp_path: Path) -> None:
    for bad in (-1, 257):
        values = FEW.astype(np.int64)
        values[400] = bad
        blocks = made(tmp_path, data(numbers(tmp_path / "a.npy", values))).train
        blocks.read(np.arange(25))
        with pytest.raises(ConfigError, match=r"a\.npy.*must hold tokens below 257.* in block 25"):
            blocks.read(np.array([3, 25]))


def test_a_map_that_changes_under_a_run_is_named(tmp_path: Path) -> None:
    file = numbers(tmp_path / "a.bin", TOKENS)
    for change in (lambda: os.truncate(file, 16), lambda: numbers(file, TOKENS[::-1]), file.unlink):
        numbers(file, TOKENS)
        os.utime(file, (1e9, 1e9))
        blocks = made(tmp_path, data(file)).train
        assert blocks.read(np.array([39])).tokens.tolist() == [FEW[-16:].tolist()]
        change()
        with pytest.raises(ConfigError, match=r"a\.bin.*must not change while a run reads it"):
            blocks.read(np.array([39]))


# --- the cache ----------------------------------------------------------------------------------------


def test_blocks_are_made_once_and_again_when_anything_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 100)
    first = made(tmp_path, data(file))
    index = tmp_path / "cache" / first.key / "blocks.json"
    stamp = index.stat().st_mtime_ns
    assert made(tmp_path, data(file)).key == first.key and index.stat().st_mtime_ns == stamp
    copy = tmp_path / "copy.txt"
    copy.write_text("x" * 100)
    assert made(tmp_path, data(copy)).key == first.key, "the content counts, not the name"
    file.write_text("y" * 100)
    keys = {first.key, made(tmp_path, data(file)).key, made(tmp_path, data(file, block=8)).key}
    assert len(keys) == 3
    assert not list((tmp_path / "cache").glob("*.[0-9]*")), "nothing half made is left"


def read_all(parts: PreparedData) -> list[np.ndarray]:
    every = np.arange(len(parts.train))
    return [*parts_of(parts.train, *every), parts.train.labels(every)]


def test_a_damaged_cache_is_never_learned_from(tmp_path: Path) -> None:
    """Every damage gives the written blocks, or an error with the folder."""
    written = data(jsonl(tmp_path / "a.jsonl", [{"messages": TALK}] * 6), block=64)
    whole = read_all(made(tmp_path, written))
    folder = tmp_path / "cache" / made(tmp_path, written).key
    names = {INDEX, *(f"train.{of}" for of in ("tokens", "marks", "counts", "sums"))}
    assert {path.name for path in folder.iterdir()} == {*names, documents.DIGESTS}  # which has no blocks
    draw = np.random.default_rng(0)
    caught = 0
    for name in sorted(names):
        file = folder / name
        before = file.read_bytes()
        flips = [
            flipped(before, int(at), int(draw.integers(8))) for at in draw.integers(len(before), size=25)
        ]
        for content in (*flips, b"", before[: len(before) // 2], before + b"\0" * 64):
            file.write_bytes(content)
            caught += _is_caught(tmp_path, written, whole)
        file.unlink()
        assert _is_caught(tmp_path, written, whole) is (name != INDEX), "without its index it is made anew"
        file.write_bytes(before)
    assert caught > 85


def _is_caught(folder: Path, written: Any, whole: list[np.ndarray]) -> bool:
    try:
        found = read_all(made(folder, written))
    except ConfigError as error:
        assert "must hold the blocks that were written" in str(error), error
        return True
    assert all(np.array_equal(here, there) for here, there in zip(found, whole, strict=True))
    return False


def test_a_file_that_changes_while_it_is_packed_leaves_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text("a text")
    whole = ByteTokenizer.encode

    def encode(self: ByteTokenizer, text: str) -> np.ndarray:
        file.write_text("another text")
        return whole(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    with pytest.raises(ConfigError, match=r"a\.txt.*must not change while it is read"):
        made(tmp_path, data(file))
    assert not list((tmp_path / "cache").glob("*/blocks.json"))
