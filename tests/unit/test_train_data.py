"""Files to blocks: formats, packing, masks, the split, the cache, token maps."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import ROWS, TALK, TEXTS, data, jsonl, made, parts_of, stream
from zerodrift import files
from zerodrift.errors import ConfigError
from zerodrift.train.data import chat_template as rendering
from zerodrift.train.data import conversation as chat
from zerodrift.train.data import prepare as pack
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.documents import Document
from zerodrift.train.data.tokenizer import ByteTokenizer

# --- packing ------------------------------------------------------------------------------------------


def test_packing_keeps_every_token_and_pads_only_the_end(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    blocks = made(tmp_path, data(file)).train
    expected = [token for text in TEXTS for token in (*text.encode(), 256)]
    found = stream(blocks)
    assert found[: len(expected)].tolist() == expected
    assert set(found[len(expected) :]) <= {256} and len(found) - len(expected) < 16
    tokens, labels = parts_of(blocks, len(blocks) - 1)
    padded = len(found) - len(expected)
    assert (labels[0, 16 - padded :] == IGNORED).all()
    assert (labels[0, : 16 - padded] == tokens[0, : 16 - padded]).all()
    assert blocks.labels(np.arange(len(blocks))).tolist() == [15] * (len(blocks) - 1) + [15 - padded]


def test_without_packing_a_document_is_a_block(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    blocks = made(tmp_path, data(file, pack=False)).train
    assert len(blocks) == len(TEXTS)
    tokens, labels = parts_of(blocks, 2, 3)
    assert tokens[0].tolist() == [*b"third", *[256] * 11]
    assert labels[0].tolist() == [*b"third", 256, *[IGNORED] * 10]
    assert tokens[1].tolist() == list(TEXTS[3].encode()[:16]), "cut"


# --- the split ----------------------------------------------------------------------------------------


def test_the_split_is_by_document_and_does_not_depend_on_the_others(tmp_path: Path) -> None:
    texts = [f"document number {number} " * 3 for number in range(200)]
    shares = {text: Document(text).number(3) / 2**64 for text in texts}
    held = {text for text, share in shares.items() if share < 0.25}
    assert 30 < len(held) < 70
    for order in (texts, texts[::-1]):
        file = jsonl(tmp_path / "a.jsonl", [{"text": text} for text in order])
        parts = made(tmp_path, data(file, validation=0.25, seed=3, pack=False, block=64))
        assert parts.validation is not None
        assert (len(parts.train), len(parts.validation)) == (len(texts) - len(held), len(held))
    assert {text for text in texts if Document(text).number(4) < 2**62} != held


def test_of_one_text_the_last_blocks_are_held_out_and_never_all(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1599))  # and the end of the text: 1600 tokens
    file = tmp_path / "one.txt"
    file.write_text(text)
    parts = made(tmp_path, data(file, validation=0.05))
    assert parts.validation is not None
    assert (len(parts.train), len(parts.validation)) == (95, 5)
    assert bytes(stream(parts.train).tolist()).decode() == text[: 95 * 16]
    assert stream(parts.validation)[-1] == 256
    for seed in range(12):
        found = made(tmp_path, data(file, validation=0.4, seed=seed))
        assert found.validation is not None and len(found.train) > len(found.validation) > 0


def test_marks_and_counts_are_split_with_the_blocks(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "one.jsonl", [{"messages": TALK}] * 40)
    whole = made(tmp_path, data(file, block=64)).train
    parts = made(tmp_path, data(file, block=64, validation=0.05))
    assert parts.validation is not None and len(parts.train) + len(parts.validation) == len(whole)
    own, there = np.arange(len(parts.validation)), np.arange(len(parts.train), len(whole))
    for found, wanted in zip(parts_of(parts.validation, *own), parts_of(whole, *there), strict=True):
        assert (found == wanted).all()
    labels = parts_of(whole, *there)[1]
    assert (labels == IGNORED).any() and (labels != IGNORED).any()
    assert (parts.validation.labels(own) == whole.labels(there)).all()


def test_validation_files_of_their_own(tmp_path: Path) -> None:
    train, other = tmp_path / "train.txt", tmp_path / "other.txt"
    train.write_text("a" * 40)
    other.write_text("b" * 20)
    parts = made(tmp_path, data(train, validation=str(other)))
    assert parts.validation is not None
    assert set(stream(parts.validation)) == {ord("b"), 256}
    assert set(stream(parts.train)) == {ord("a"), 256}


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


# --- conversations ------------------------------------------------------------------------------------


def test_a_prompt_is_a_question_or_bare_text() -> None:
    letters = ByteTokenizer()
    assert rendering.prompt_tokens("Hi", letters, False) == ([*b"Hi"], {letters.end})
    assert rendering.prompt_tokens("", letters, False) == ([letters.end], {letters.end})
    given, ends = rendering.prompt_tokens("Hi", letters, True)
    assert given == [*b"<|user|>\nHi", letters.end, *b"<|assistant|>\n"] and ends == {letters.end}


def test_only_what_the_assistant_says_is_learned() -> None:
    talk = chat.Conversation(tuple(TALK), "a talk")
    tokens, learned = rendering.encode_conversation(talk, ByteTokenizer(), learn_all=False)
    said = "".join(chr(token) if token < 256 else "$" for token in tokens)
    assert said == "<|user|>\nHi$<|assistant|>\nYo$<|user|>\nMore$<|assistant|>\nNo$"
    assert "".join(said[place] for place in np.flatnonzero(learned)) == "Yo$No$"
    assert rendering.encode_conversation(talk, ByteTokenizer(), learn_all=True)[1].all()


# --- token maps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_token_maps_are_used_as_they_lie(tmp_path: Path, kind: str) -> None:
    flat = (np.arange(70) % 250).astype(np.uint16)
    file = tmp_path / f"tokens.{kind}"
    np.save(file, flat) if kind == "npy" else flat.tofile(file)
    parts = made(tmp_path, data(file, validation=0.25))
    assert parts.sets[0].counts.kind == "tokens" and parts.validation is not None
    assert stream(parts.train).tolist() == flat[:48].tolist()
    assert stream(parts.validation).tolist() == flat[48:64].tolist()
    assert not (tmp_path / "cache").exists()


def test_a_text_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("")
    with pytest.raises(ConfigError, match="must fill at least one block"):
        made(tmp_path, data(tmp_path / "short.txt"))


def test_without_locks_several_make_the_same_blocks_and_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "fcntl", None)
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    make, asked = pack._make_blocks, data(file)
    first: list[np.ndarray] = []

    def slowly(*arguments: Any) -> None:
        """Begin slowly, while another process begins and ends."""
        monkeypatch.setattr(pack, "_make_blocks", make)
        first.append(stream(made(tmp_path, asked).train))
        make(*arguments)

    monkeypatch.setattr(pack, "_make_blocks", slowly)
    assert np.array_equal(stream(made(tmp_path, asked).train), first[0])
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_what_a_killed_maker_left_is_removed(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    key = made(tmp_path, data(file)).key
    cache = tmp_path / "cache"
    shutil.rmtree(cache / key)
    (cache / f"{key}.0123").mkdir()
    (cache / f"{key}.0123" / "half").write_text("of a map")
    (cache / "another.0123").mkdir()
    made(tmp_path, data(file))
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {key, "another.0123"}
