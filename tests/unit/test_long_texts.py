"""Texts that are tokenized piece by piece have the tokens of the whole, in flat memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import data, stream
from zerodrift.errors import ConfigError
from zerodrift.train.data import formats
from zerodrift.train.data import tokenizer as letters_of
from zerodrift.train.data.prepare import prepare
from zerodrift.train.data.tokenizer import ByteTokenizer, TransformersTokenizer

PROSE = "".join(path.read_text() for path in sorted(Path(__file__, "../../../docs").resolve().glob("t*.md")))
ODD = "äöü😀日本語 " * 30 + " " * 200 + "\n" * 90 + "a" * 300 + "0123456789" * 20 + "\n \n\t"
TEXT = PROSE[:9000] + ODD + PROSE[9000:20_000] + ODD


def tokenizer(folder: Path, kind: str) -> TransformersTokenizer:
    """Make a tokenizer like GPT's or Llama's, which depend on different contexts of a place."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    if kind == "bytes":
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        trainer: Any = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters)
    else:
        inner = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        inner.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
        special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
        trainer = trainers.BpeTrainer(vocab_size=800, max_token_length=12, special_tokens=special)
    trainer.show_progress = False
    inner.train_from_iterator([PROSE[:8000]], trainer)
    inner.add_special_tokens(["<s>", "</s>"])
    if kind == "spaces":
        start = [("<s>", inner.token_to_id("<s>"))]
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=start)
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>").save_pretrained(str(folder))
    return TransformersTokenizer(folder)


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_windows_have_the_tokens_of_the_whole(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = tokenizer(tmp_path, kind)
    whole = letters.encode(TEXT)
    monkeypatch.setattr(letters_of, "WINDOW", 2048)
    monkeypatch.setattr(letters_of, "OVERLAP", 512)
    pieces = [TEXT[at : at + 501] for at in range(0, len(TEXT), 501)]
    found = list(letters_of.encode_pieces(pieces, letters))
    assert len(found) > 3 and np.array_equal(np.concatenate(found), whole)
    assert letters.start == ((letters.inner.convert_tokens_to_ids("<s>"),) if kind == "spaces" else ())


def test_a_text_begins_as_its_tokenizer_begins_one(tmp_path: Path) -> None:
    """`transformers` puts `<s>` in front for Llama, and so does TRL."""
    letters, file = tokenizer(tmp_path / "letters", "spaces"), tmp_path / "a.txt"
    file.write_text("A text to begin.")
    found = stream(prepare(data(file), letters, tmp_path / "cache").train)
    whole = [*letters.inner("A text to begin.")["input_ids"], letters.end]
    assert found[: len(whole)].tolist() == whole


def test_a_text_of_any_size_takes_the_same_memory(tmp_path: Path) -> None:
    peaks = []
    for megabytes in (1, 4):
        file = tmp_path / f"{megabytes}.txt"
        file.write_text("A line that is of some length.\n" * (megabytes * (1 << 20) // 31))
        tracemalloc.start()
        found = prepare(data(file, block=2048), ByteTokenizer(), tmp_path / "cache")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(found.train) >= megabytes * 500
    assert peaks[1] < 1.3 * peaks[0] < 16 << 20


def test_pieces_are_the_text_wherever_they_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    content = "\ufeffÜber\r\nzwei\rdrei\n\r\n日本\r"
    file.write_bytes(content.encode())
    meant = content[1:].replace("\r\n", "\n").replace("\r", "\n")
    for size in (1, 2, 3, 5, 100):
        monkeypatch.setattr(formats, "_PIECE", size)
        assert "".join(formats.read_text(file)) == meant
        for damaged, words in (
            (b"12345\xff", "byte 0xff at offset 5"),
            ("äöü\0".encode(), "a zero at character 3"),
            (b"1234\xe6\x97", "byte 0xe6 at offset 4"),
        ):
            file.write_bytes(damaged)
            with pytest.raises(ConfigError, match=words):
                list(formats.read_text(file))
        file.write_bytes(content.encode())
    assert "".join(formats.read_text(file)) == meant
