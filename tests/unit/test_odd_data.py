"""Damaged and odd data files: every learned token was written, or an error names the file."""

from __future__ import annotations

import codecs
import gzip
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.data_files import ROWS, TALK, TEXTS, data, jsonl, made, parts_of, stream
from tests.unit.letters import byte_tokenizer
from zerodrift.errors import ConfigError, ModelError
from zerodrift.train.data import chat_template as rendering
from zerodrift.train.data import conversation as chat
from zerodrift.train.data import documents
from zerodrift.train.data.blocks import INDEX
from zerodrift.train.data.prepare import PreparedData
from zerodrift.train.data.tokenizer import ByteTokenizer, TransformersTokenizer
from zerodrift.train.loop.model import check_positions

TEXT = "a text of some length, with Übung in it\n" * 20
ROW = json.dumps({"text": TEXT}) + "\n"


def row(**values: Any) -> str:
    return json.dumps(values) + "\n"


def talk(**last: Any) -> str:
    return row(messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", **last}])


REFUSED: dict[str, tuple[str, bytes | str, str]] = {
    "latin1": ("a.txt", TEXT.encode("latin1"), "must be UTF-8 text; got byte 0xdc at offset 28"),
    "bytes": ("a.txt", b"\x80\xff" * 500, "must be UTF-8 text"),
    "utf16": ("a.txt", TEXT.encode("utf-16"), "got UTF-16. Save it as UTF-8"),
    "utf16 unmarked": ("a.txt", "plain".encode("utf-16-le") * 20, "must be text; got a zero at character 1"),
    "gzip twice": ("a.gz", gzip.compress(gzip.compress(b"a")), "a gzip file, packed once more. Unpack it"),
    "half a gzip": ("a.jsonl.gz", gzip.compress(ROW.encode())[:-9], "a gzip file that ends early"),
    "half a character": ("a.jsonl", '{"text": "\\ud800 and more"}\n', "text.*must be valid Unicode"),
    "a key twice": ("a.jsonl", '{"text": "a", "text": "b"}\n', "a key twice"),
    "cut": ("a.jsonl", ROW + ROW[:-9], r"a\.jsonl:2.*must be JSON"),
    "null": ("a.jsonl", ROW + row(text=None), r"a\.jsonl:2.*must have a text"),
    "content null": ("a.jsonl", talk(content=None), r"messages\[1\]: content.*must be a text.*got null"),
    "tool calls": ("a.jsonl", talk(tool_calls=[{"name": "f"}]), "`role` and `content` alone.*tool_calls"),
    "output number": ("a.jsonl", row(instruction="Hi", output=7), "output.*must be a text; got a number"),
    "parquet": ("a.parquet", b"PAR1" + bytes(100), "must be parquet"),
    "ORC": ("a.txt", b"ORC\x03", "got an ORC file"),
    "marks of good and bad": ("a.jsonl", row(prompt="Hi", completion="Yo", label=False), "with a `label`"),
    "a text beside a question": (*("a.jsonl", row(instruction="Hi", output="Yo", text="Hi Yo")),
        r"a\.jsonl:1.*must be a text or a conversation.*Set `data\.format: text`"),
    "two objects in a line": ("a.jsonl", '{"text": "a"}{"text": "b"}\n', "more behind the first value"),
    "an open text": ("a.jsonl", '{"text": "a', "Unterminated string starting at column 10"),
    "what is said in another key": (*("a.jsonl", talk(content=None, refusal="No")),
        r"messages\[1\]: content.*got null beside `refusal`"),
    "columns in a row": ("a.json", '{"text": ["a", "b"]}', "got a list.*Name a column"),
    "turns under another name": ("a.jsonl", row(dialog=TALK), "one of turns in `data.messages`"),
    "a TSV with quotes": ("a.tsv", 'text, long\tn\n"a" b\t1\n', r"a\.tsv:2.*must be CSV"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_learned_as_it_is_is_refused(kind: str, tmp_path: Path) -> None:
    name, content, words = REFUSED[kind]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="comes with `datasets`")
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=words):
        made(tmp_path, data(file))
    left = {path.name for path in (tmp_path / "cache").glob("*")}
    assert all(name == "digests.json" or name.endswith(".lock") for name in left)


SAME: dict[str, Callable[[str], bytes]] = {
    "marked": lambda text: codecs.BOM_UTF8 + text.encode(),
    "windows": lambda text: text.replace("\n", "\r\n").encode(),
}


@pytest.mark.parametrize("kind", SAME)
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_what_an_editor_adds_is_no_token(kind: str, suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(SAME[kind](TEXT if suffix == "txt" else ROW * 2))
    assert stream(made(tmp_path, data(file)).train)[: len(TEXT.encode())].tolist() == [*TEXT.encode()]


@pytest.mark.parametrize("name", ["", "x" * 5000, "~nobody-here/a.txt", "a\0b", "/dev/zero", "/dev/null"])
@pytest.mark.timeout(30)
def test_a_name_of_no_files_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train.*must name files"):
        made(tmp_path, data(Path("unused"), train=name))


def test_a_block_that_is_too_short_for_answers_is_to_be_raised(tmp_path: Path) -> None:
    """Conversations cut before their answer are refused; where only their ends are cut, a line says so."""
    chats = jsonl(tmp_path / "a.jsonl", [{"prompt": "q" * 20, "completion": "answer"}] * 4)
    with pytest.raises(ConfigError, match=r"Raise `data\.block`\.") as raised:
        made(tmp_path, data(chats, block=24, format="chat"))
    longest = len(b"<|user|>\n<|assistant|>\n" + b"q" * 20 + b"answer") + 2
    lost = 4 * (longest - 24)
    cut = f"4 conversations cut at the end of a block, by {lost} tokens in all; the longest has {longest}"
    assert cut in raised.value.got
    counts = made(tmp_path, data(chats, block=48, format="chat")).sets[0].counts
    facts = dict(counts.facts())
    assert facts["too long"].startswith("4 conversations cut") and "left out" not in facts
    assert facts["look at"].startswith("most conversations are cut, 4 of 4: raise `data.block`")
    empty = jsonl(tmp_path / "b.jsonl", [{"messages": TALK[:1]}])
    with pytest.raises(ConfigError, match=r"nothing to learn.*Name more files"):
        made(tmp_path, data(empty))


def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    reading = made(tmp_path, data(file, pack=False)).sets[0].counts
    lost = sum(max(0, len(text.encode()) + 1 - 16) for text in TEXTS)
    assert (reading.cut, reading.cut_tokens) == (2, lost)
    asked = {"prompt": "a question that fills the whole block by itself", "completion": "?"}
    rows = [asked, {"prompt": "q", "completion": "answer"}, {"messages": TALK[:1]}]
    reading = made(tmp_path, data(jsonl(tmp_path / "b.jsonl", rows), block=32, format="chat")).sets[0].counts
    assert reading.cuts() == [
        "1 conversation cut at the end of a block, by 41 tokens in all; the longest has 73"
    ]
    assert reading.reasons() == [
        "1 conversation without a turn of the assistant to learn",
        "1 block with nothing to learn",
    ]


def test_keys_that_name_columns_name_those_of_the_rows(tmp_path: Path) -> None:
    asked = {"prompt": "Hi", "completion": "Yo"}
    file = jsonl(tmp_path / "a.jsonl", [asked, asked])
    found = made(tmp_path, data(file, field="prompt"))
    assert stream(found.train)[:6].tolist() == [*b"Hi", 256, *b"Hi", 256]
    for keys, words in (
        ({"field": "body"}, r"a\.jsonl:1.*must have a text in `body`; got `prompt`"),
        ({"field": "prompt", "format": "chat"}, r"data\.field.*conversations"),
        ({"messages": "dialog"}, "must have `dialog`, which `data.messages` names; got `prompt`"),
    ):
        with pytest.raises(ConfigError, match=words):
            made(tmp_path, data(file, **keys))
    half = jsonl(tmp_path / "b.jsonl", [asked, {"prompt": "Hi"}])
    with pytest.raises(ConfigError, match=r"b\.jsonl:2.*must have a text in `completion`; got `prompt`"):
        made(tmp_path, data(half, format="text"))
    both = jsonl(tmp_path / "c.jsonl", [{"messages": TALK, "text": "Hi", "n": None}])
    reading = made(tmp_path, data(both, block=64)).sets[0].counts
    assert (reading.kind, reading.unread) == ("chat", ["text"]), "what is empty is not missed"
    prose = tmp_path / "a.txt"
    prose.write_text("hi" * 500)
    with pytest.raises(ConfigError, match=r"a\.txt.*must be a map of token numbers"):
        made(tmp_path, data(prose, format="tokens"))


def test_what_may_not_be_meant_is_noted(tmp_path: Path) -> None:
    silent = [*TALK[:-1], {"role": "assistant", "content": " \n"}]
    chats = jsonl(tmp_path / "chats.jsonl", [{"messages": turns} for turns in (TALK, TALK, silent)])
    once = jsonl(tmp_path / "held.jsonl", [{"messages": turns} for turns in (TALK, TALK[:3])])
    found = made(tmp_path, data(chats, block=64, validation=str(once)))
    plain = "written with `<|role|>` in front of each turn: the tokenizer has no chat template"
    assert found.sets[0].counts.notes()[-1] == "1 conversation like another one"
    assert "1 conversation with an answer of nothing, which is not learned" in found.sets[0].counts.notes()
    assert found.sets[1].counts.notes() == [f"2 conversations {plain}", "1 conversation trained on as well"]
    trained, held = (text for _, text in found.lines())
    assert "trained on as well" in held and "trained on as well" not in trained and "held out" not in trained
    (tmp_path / "cache" / found.sets[1].key / documents.DIGESTS).write_bytes(b"1234")
    with pytest.raises(ConfigError, match="must hold the blocks that were written"):
        made(tmp_path, data(chats, block=64, validation=str(once)))


def test_one_file_is_read_once_by_whatever_path(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    (tmp_path / "b.txt").symlink_to(file)
    found = made(tmp_path, data(Path("unused"), train=[str(file), f"{tmp_path}/../{tmp_path.name}/b.txt"]))
    (reading,) = (each.counts for each in found.sets)
    assert reading.files == 1 and "a.txt, which is " in reading.beside[0]


# --- what is held out ---------------------------------------------------------------------------------


def test_a_validation_that_was_asked_for_is_there(tmp_path: Path) -> None:
    file, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    file.write_text(TEXT)
    empty.write_text("")
    numbers, few = tmp_path / "a.bin", tmp_path / "few.bin"
    np.arange(64, dtype=np.uint16).tofile(numbers)
    np.arange(3, dtype=np.uint16).tofile(few)
    for train, held in ((file, empty), (numbers, few)):
        with pytest.raises(ConfigError, match=r"data\.validation.*must fill at least one block"):
            made(tmp_path, data(train, validation=str(held)))
    for train in (file, numbers):
        with pytest.raises(ConfigError, match=r"data\.validation.*which (is|are) trained on"):
            made(tmp_path, data(train, block=64 if train == numbers else 4096, validation=0.1, seed=1))


# --- token maps ---------------------------------------------------------------------------------------


def numbers(file: Path, values: np.ndarray) -> Path:
    np.save(file, values) if file.suffix == ".npy" else values.tofile(file)
    return file


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


FEW = np.arange(640) % 250
TOKENS = FEW.astype(np.uint16)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("a.npy", FEW - 1, "none below 0; got -1 to 14"),
        ("a.npy", np.full(640, 2**63, np.uint64), "below 257"),
        ("a.npy", FEW * 1.0, "one row of whole numbers; got float64"),
        ("a.npy", FEW.reshape(20, 32), "one row of whole numbers"),
        ("a.npy", FEW > 3, "one row of whole numbers; got bool"),
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
    for at, bit in itertools.product(range(0, 128, 2), range(0, 8, 2)):
        file.write_bytes(flipped(before, at, bit))
        try:
            found = stream(made(tmp_path, data(file)).train)
        except ConfigError as error:
            assert "a.npy" in str(error)
            caught += 1
        else:
            assert np.array_equal(found, whole) or at < 60, at
    assert caught > 100


@pytest.mark.parametrize("bad", [-1, 257, 60_000])
def test_a_token_that_the_model_does_not_know_is_named_where_it_is_read(bad: int, tmp_path: Path) -> None:
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
        with pytest.raises(ConfigError, match=r"a\.bin.*must stay as it is while a run reads it"):
            blocks.read(np.array([39]))


def test_another_map_of_the_same_size_is_another_place_in_the_data(tmp_path: Path) -> None:
    first, moved, other = (
        made(tmp_path, data(numbers(tmp_path / name, values))).key
        for name, values in (("a.bin", TOKENS), ("b.bin", TOKENS), ("a.bin", TOKENS[::-1]))
    )
    assert first == moved != other


# --- the cache ----------------------------------------------------------------------------------------


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
            flipped(before, int(at), int(draw.integers(8))) for at in draw.integers(len(before), size=60)
        ]
        for content in (*flips, b"", before[: len(before) // 2], before + b"\0" * 64):
            file.write_bytes(content)
            caught += _is_caught(tmp_path, written, whole)
        file.unlink()
        if name != INDEX:  # without that it is not there, and made anew
            assert _is_caught(tmp_path, written, whole)
        file.write_bytes(before)
    assert caught > 200


def _is_caught(folder: Path, written: Any, whole: list[np.ndarray]) -> bool:
    try:
        found = read_all(made(folder, written))
    except ConfigError as error:
        assert "must hold the blocks that were written" in str(error), error
        return True
    assert all(np.array_equal(here, there) for here, there in zip(found, whole, strict=True))
    return False


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b"\xff", b'{"a": 3}', b"[" * 10**5])
def test_damaged_digests_are_made_anew(content: bytes, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", ROWS)
    key = made(tmp_path, data(file)).key
    (tmp_path / "cache" / "digests.json").write_bytes(content)
    assert made(tmp_path, data(file)).key == key


def test_a_file_that_changes_while_it_is_packed_leaves_no_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    whole = ByteTokenizer.encode

    def encode(self: ByteTokenizer, text: str) -> np.ndarray:
        file.write_text(TEXT * 2)
        return whole(self, text)

    monkeypatch.setattr(ByteTokenizer, "encode", encode)
    with pytest.raises(ConfigError, match=r"a\.txt.*must stay as it is while it is read"):
        made(tmp_path, data(file))
    assert not list((tmp_path / "cache").glob("*/blocks.json"))


# --- models and tokenizers ----------------------------------------------------------------------------


def test_a_block_is_no_longer_than_the_positions_of_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    gpt2 = {"n_positions": 32, "n_layer": 1, "n_embd": 8, "n_head": 1}
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    llama = {"max_position_embeddings": 32, **dict(zip(names, (1, 8, 8, 1), strict=True))}
    for kind, sizes in (("gpt2", gpt2), ("llama", llama)):
        config = transformers.AutoConfig.for_model(kind, vocab_size=257, **sizes)
        model = transformers.AutoModelForCausalLM.from_config(config)
        check_positions(model, 32)
        with pytest.raises(ModelError, match=r"data\.block.*at most the 32 positions"):
            check_positions(model, 33)


def test_the_last_number_of_a_tokenizer_is_its_vocabulary(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = byte_tokenizer(tmp_path)
    plain = TransformersTokenizer(folder)
    file = folder / "tokenizer.json"
    written = json.loads(file.read_text())
    word, last = max(written["model"]["vocab"].items(), key=lambda item: item[1])
    written["model"]["vocab"][word] = last + 1000
    for added in written.get("added_tokens", []):
        added["id"] += 1000 if added["id"] == last else 0
    file.write_text(json.dumps(written))
    assert TransformersTokenizer(folder).vocabulary == plain.vocabulary + 1000
    assert TransformersTokenizer(folder).fingerprint != plain.fingerprint


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages[7].content }}", "{% if"])
def test_a_template_that_fails_is_an_error_with_its_name(template: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    letters = TransformersTokenizer(byte_tokenizer(tmp_path))
    letters.inner.chat_template = template
    with pytest.raises(ConfigError, match=r"a\.jsonl:3.*that the chat template of .*user, assistant"):
        rendering.encode_conversation(chat.Conversation(tuple(TALK), "a.jsonl:3"), letters, learn_all=True)
