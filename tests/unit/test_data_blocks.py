"""Rows to blocks: packing, what is learned and held out, several sets in shares, and the blocks of a step."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data_files import ROWS, TALK, TEXTS, data, jsonl, layout, made, parts_of, stream
from zerodrift.errors import ConfigError, ModelError
from zerodrift.train.data import chat_template as rendering
from zerodrift.train.data import conversation as chat
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.documents import Document
from zerodrift.train.data.sampling import (
    BlockSampler,
    Feed,
    Mixture,
    divide_by_weight,
)
from zerodrift.train.data.tokenizer import ByteTokenizer
from zerodrift.train.loop.model import check_positions

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


def test_what_is_cut_and_what_is_not_learned_is_counted(tmp_path: Path) -> None:
    """Conversations cut before their answer are refused; where only their ends are cut, a line says so."""
    reading = made(tmp_path, data(jsonl(tmp_path / "t.jsonl", ROWS), pack=False)).sets[0].counts
    assert reading.cut_tokens == sum(max(0, len(text.encode()) + 1 - 16) for text in TEXTS) > 0
    chats = jsonl(tmp_path / "a.jsonl", [{"prompt": "q" * 20, "completion": "answer"}] * 4)
    with pytest.raises(ConfigError, match=r"Raise `data\.block`\."):
        made(tmp_path, data(chats, block=24, format="chat"))
    facts = dict(made(tmp_path, data(chats, block=48, format="chat")).sets[0].counts.facts())
    assert "by 12 tokens in all" in facts["too long"] and "left out" not in facts
    assert facts["look at"].startswith("most conversations are cut, 4 of 4: raise `data.block`")
    asked = {"prompt": "a question that fills the whole block by itself", "completion": "?"}
    rows = [asked, {"prompt": "q", "completion": "answer"}, {"messages": TALK[:1]}]
    reading = made(tmp_path, data(jsonl(tmp_path / "b.jsonl", rows), block=32, format="chat")).sets[0].counts
    assert reading.reasons() == [
        "1 conversation without a turn of the assistant to learn",
        "1 block with nothing to learn",
    ]
    with pytest.raises(ConfigError, match=r"nothing to learn.*Name more files"):
        made(tmp_path, data(jsonl(tmp_path / "c.jsonl", rows[2:])))


def test_only_what_the_assistant_says_is_learned() -> None:
    talk = chat.Conversation(tuple(TALK), "a talk")
    tokens, learned = rendering.encode_conversation(talk, ByteTokenizer(), learn_all=False)
    said = "".join(chr(token) if token < 256 else "$" for token in tokens)
    assert said == "<|user|>\nHi$<|assistant|>\nYo$<|user|>\nMore$<|assistant|>\nNo$"
    assert "".join(said[place] for place in np.flatnonzero(learned)) == "Yo$No$"
    assert rendering.encode_conversation(talk, ByteTokenizer(), learn_all=True)[1].all()


# --- what is held out -------------------------------------------------------------------------------


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


def test_of_one_text_the_last_blocks_are_held_out(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1599))  # and the end of the text: 1600 tokens
    file = tmp_path / "one.txt"
    file.write_text(text)
    parts = made(tmp_path, data(file, validation=0.05))
    assert parts.validation is not None
    assert (len(parts.train), len(parts.validation)) == (95, 5)
    assert bytes(stream(parts.train).tolist()).decode() == text[: 95 * 16]
    assert stream(parts.validation)[-1] == 256


def test_marks_and_counts_are_split_with_the_blocks(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "one.jsonl", [{"messages": TALK[: 2 if n % 3 else 4]} for n in range(40)])
    whole = made(tmp_path, data(file, block=64)).train
    parts = made(tmp_path, data(file, block=64, validation=0.05))
    assert parts.validation is not None and len(parts.train) + len(parts.validation) == len(whole)
    own, there = np.arange(len(parts.validation)), np.arange(len(parts.train), len(whole))
    for found, wanted in zip(parts_of(parts.validation, *own), parts_of(whole, *there), strict=True):
        assert (found == wanted).all()
    labels = parts_of(whole, *there)[1]
    assert (labels == IGNORED).any() and (labels != IGNORED).any()
    assert (parts.validation.labels(own) == whole.labels(there)).all()


def test_a_validation_that_was_asked_for_is_there(tmp_path: Path) -> None:
    file, empty = tmp_path / "a.txt", tmp_path / "empty.txt"
    file.write_text("a text of some length " * 40)
    empty.write_text("")
    with pytest.raises(ConfigError, match="must fill at least one block"):
        made(tmp_path, data(empty))
    numbers, few = tmp_path / "a.bin", tmp_path / "few.bin"
    np.arange(64, dtype=np.uint16).tofile(numbers)
    np.arange(3, dtype=np.uint16).tofile(few)
    for train, held in ((file, empty), (numbers, few)):
        with pytest.raises(ConfigError, match=r"data\.validation.*must fill at least one block"):
            made(tmp_path, data(train, validation=str(held)))
    for train in (file, numbers):
        with pytest.raises(ConfigError, match=r"data\.validation.*which (is|are) used for training"):
            made(tmp_path, data(train, block=64 if train == numbers else 4096, validation=0.1, seed=1))


def test_a_file_is_not_trained_on_and_validated_with(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", texts(3, "a"))
    with pytest.raises(ConfigError, match=r"data\.validation.*other files.*a\.jsonl in both"):
        made(tmp_path, data(file, validation=str(tmp_path)))


# --- several sets -----------------------------------------------------------------------------------


WORDS = ["an", "evening", "of", "long", "words", "without", "end"]


def texts(count: int, first: str) -> list[dict[str, Any]]:
    return [{"text": f"{first}{number:03d} " + "x" * 9} for number in range(count)]


def mixed(folder: Path, **weights: float) -> Any:
    sets = []
    for name, weight in weights.items():
        file = jsonl(folder / f"{name}.jsonl", texts({"a": 40, "b": 10, "c": 3}[name], name))
        sets.append({"path": str(file), "weight": weight})
    return data(folder, train=sets, pack=False)


def test_each_set_gives_its_share_of_every_step(tmp_path: Path) -> None:
    train = made(tmp_path, mixed(tmp_path, a=1, b=3)).train
    assert isinstance(train, Mixture) and len(train) == 50
    feed = Feed(train, 0, layout(10))
    steps = [next(feed.step(number)) for number in range(10)]
    seen = [bytes(row[:4].tolist()) for step in steps for row in step.tokens]
    letters = Counter(name[:1] for name in seen[:50])
    assert letters == {b"a": 13, b"b": 37}, "an epoch: a quarter of 50, and the rest"
    of_a = [name for name in seen if name[:1] == b"a"]
    assert len(of_a) == len(set(of_a)) == 26, "none of a large set comes again before all have come"
    of_b = Counter(name for name in seen[:50] if name[:1] == b"b")
    assert set(of_b.values()) == {3, 4}, "a small one begins again when it is used up"
    for number in (7, 3):
        again = next(Feed(train, 0, layout(10)).step(number))
        assert torch.equal(again.tokens, steps[number].tokens), "by the number of the step alone"


def test_what_is_held_out_is_of_every_set(tmp_path: Path) -> None:
    held = made(tmp_path, mixed(tmp_path, a=1, b=3).model_copy(update={"validation": 0.3})).validation
    assert held is not None
    assert {chr(int(row[0])) for row in parts_of(held, *range(len(held)))[0]} == {"a", "b"}


@pytest.mark.parametrize("weights", [(1, 1), (1, 1000), (0.001, 5, 2), (3, 2, 1)])
def test_shares_add_up_and_leave_nobody_out(weights: tuple[float, ...]) -> None:
    counts = (40, 10, 3)[: len(weights)]
    given = divide_by_weight(counts, weights)
    assert sum(given) == sum(counts) and min(given) >= 1


# --- documents that share a block --------------------------------------------------------------------


def chats(folder: Path, count: int = 30) -> Path:
    draw = np.random.default_rng(0)

    rows = [
        {"prompt": " ".join(draw.choice(WORDS, 2)), "completion": " ".join(draw.choice(WORDS, 1 + n % 5))}
        for n in range(count)
    ]
    return jsonl(folder / "chats.jsonl", rows)


def test_conversations_share_blocks_and_stay_whole(tmp_path: Path) -> None:
    file = chats(tmp_path)
    alone, packed = (made(tmp_path, data(file, block=128, pack=pack)).train for pack in (False, True))
    assert len(packed) < 0.7 * len(alone)
    pieces, found = Counter(), Counter()
    for tokens, labels in zip(*parts_of(alone, *range(len(alone))), strict=True):
        last = int(np.flatnonzero(labels != IGNORED)[-1]) + 1
        pieces[tuple(tokens[:last]), tuple(labels[:last])] += 1
    for tokens, labels in zip(*parts_of(packed, *range(len(packed))), strict=True):
        start = 0
        for place in np.flatnonzero((labels != IGNORED) & (tokens == ByteTokenizer.end)):
            found[tuple(tokens[start : place + 1]), tuple(labels[start : place + 1])] += 1
            start = int(place) + 1
        assert (labels[start:] == IGNORED).all() and (tokens[start:] == ByteTokenizer.end).all()
    assert found == pieces


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_a_document_of_a_packed_block_is_as_if_it_were_alone(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    more = {"max_position_embeddings": 128, "initializer_range": 0.3, "use_cache": False}
    config = transformers.LlamaConfig(vocab_size=257, **sizes, **more)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().double()
    file = chats(tmp_path, 12) if kind == "chat" else jsonl(tmp_path / "a.jsonl", texts(12, "a"))
    rest = {"block": 128, "pack": True, "attend": "document"}
    feed = Feed(made(tmp_path, data(file, **rest)).train, 0, layout(2))
    batch = next(feed.step(0))
    assert batch.positions is not None
    with torch.no_grad():
        packed = model(input_ids=batch.tokens, position_ids=batch.positions).logits
    documents = 0
    for row in range(2):
        starts = np.flatnonzero(batch.positions[row].numpy() == 0).tolist()
        for first, end in zip(starts, [*starts[1:], 128], strict=True):
            with torch.no_grad():
                alone = model(input_ids=batch.tokens[row : row + 1, first:end]).logits[0]
            torch.testing.assert_close(packed[row, first:end], alone, rtol=1e-9, atol=1e-9)
            assert not first or batch.labels[row, first] == IGNORED, "it follows from nothing"
            documents += 1
    assert documents > 2
    blind = made(tmp_path, data(file, **{**rest, "attend": "block"})).train.read(np.arange(2))
    assert blind.positions is None


class Reading(torch.nn.Module):
    """A model of two layers that attends within documents, or beyond them."""

    def __init__(self, sees: str) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(257, 16), torch.nn.Linear(16, 257)
        self.sees = sees

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, position_ids: torch.Tensor) -> Any:
        words = self.embed(input_ids)
        before = words.cumsum(1)
        if self.sees == "document":
            starts = torch.arange(input_ids.shape[1]) - position_ids
            gone = before - words
            before = before - gone.gather(1, starts[..., None].expand_as(gone))
        logits = self.head(before.tanh())[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Reading("document"), ""),
        (Reading("block"), "Reading, in which a document sees"),
        (torch.nn.Linear(4, 4), "Linear, whose `forward` takes no `position_ids`"),
    ],
)
def test_a_model_that_does_not_keep_documents_apart_is_named(model: torch.nn.Module, words: str) -> None:
    import zerodrift as zd
    from zerodrift.train.loop.model import require_document_mask

    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "train_batch_size": 2}
    engine = zd.initialize(model, config=config, quiet=True)
    told = pytest.raises(ConfigError, match=rf"data\.attend.*must be `block` for this model; got {words}")
    try:
        with told if words else contextlib.nullcontext():
            require_document_mask(engine, layout(2), 32, 257)
    finally:
        engine.destroy()


def test_a_block_is_no_longer_than_the_positions_of_the_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_positions=32, n_layer=1, n_embd=8, n_head=1, vocab_size=257)
    model = transformers.GPT2LMHeadModel(config)
    check_positions(model, 32)
    with pytest.raises(ModelError, match=r"data\.block.*at most the 32 positions"):
        check_positions(model, 33)


# --- the blocks of a step ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 17, 4096])
def test_an_epoch_has_every_block_once_in_an_order_of_its_own(count: int) -> None:
    epochs = [
        [BlockSampler(count, seed).at(epoch * count + place) for place in range(count)]
        for seed, epoch in ((3, 0), (3, 1), (4, 0))
    ]
    assert all(sorted(found) == list(range(count)) for found in epochs)
    if count == 4096:
        assert epochs[0] != epochs[1] and epochs[0] != epochs[2]
        apart = np.abs(np.diff(epochs[0])).mean() / count
        assert 0.28 < apart < 0.39, "two random places are a third apart"


@pytest.mark.parametrize("micro", [1, 2, 3, 6])
def test_the_micro_batches_of_a_step_have_every_block_once(micro: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1599)
    blocks = made(tmp_path, data(tmp_path / "a.txt")).train
    feeds = [Feed(blocks, 0, layout(micro, rank, 2, 6 // micro)) for rank in range(2)]
    found = [
        batch.blocks.tolist()
        for pair in zip(*(feed.step(7) for feed in feeds), strict=True)
        for batch in pair
    ]
    assert np.concatenate(found).tolist() == [BlockSampler(100, 0).at(7 * 12 + place) for place in range(12)]


def test_token_maps_of_one_set_have_one_order(tmp_path: Path) -> None:
    for name, count in (("a", 160), ("b", 320)):
        (tmp_path / f"{name}.bin").write_bytes((np.arange(count) % 250).astype(np.uint16).tobytes())
    (batch,) = Feed(made(tmp_path, data(tmp_path)).train, 0, layout(30)).step(0)
    assert batch.blocks.tolist() == [BlockSampler(30, 0).at(place) for place in range(30)]
