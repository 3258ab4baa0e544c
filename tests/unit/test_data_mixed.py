"""The blocks of a step, several sets of data in shares, and documents that share blocks."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data_files import data, jsonl, layout, made, parts_of
from zerodrift.errors import ConfigError
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.sampling import (
    BlockSampler,
    Feed,
    Mixture,
    MixtureSampler,
    blocks_of,
    divide_by_weight,
    permute,
)
from zerodrift.train.data.tokenizer import ByteTokenizer


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000])
def test_an_epoch_has_every_block_once(count: int) -> None:
    sampler = BlockSampler(count, seed=3)
    for epoch in range(3):
        found = [sampler.at(epoch * count + place) for place in range(count)]
        assert sorted(found) == list(range(count))


def test_epochs_and_seeds_differ_and_repeat_and_an_order_looks_like_chance() -> None:
    first, again, other, next_epoch = (
        [BlockSampler(1000, seed).at(begin + place) for place in range(1000)]
        for seed, begin in ((3, 0), (3, 0), (4, 0), (3, 1000))
    )
    assert first == again and first != other and first != next_epoch
    order = np.array([permute(place, 4096, key=99) for place in range(4096)])
    assert abs(np.corrcoef(order, np.arange(4096))[0, 1]) < 0.05
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.05
    gaps = np.abs(np.diff(order))
    assert 0.28 < gaps.mean() / 4096 < 0.39, "two random places are a third apart"


@pytest.mark.parametrize(("ranks", "micro", "accumulation"), [(1, 2, 6), (2, 3, 2), (4, 1, 3), (6, 2, 1)])
def test_a_step_has_the_same_blocks_on_any_number_of_ranks(ranks: int, micro: int, accumulation: int) -> None:
    chosen = BlockSampler(100, 0).step(7, 12)
    found = [
        blocks_of(chosen, turn * ranks + rank, micro) for rank in range(ranks) for turn in range(accumulation)
    ]
    assert sorted(np.concatenate(found)) == sorted(chosen)


def test_whole_blocks_weigh_one_and_share_their_tensor(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    np.arange(160, dtype=np.uint16).tofile(file)
    for batch in Feed(made(tmp_path, data(file, block=8)).train, 0, layout(2, 0, 2, 3)).step(0):
        assert batch.weight == 1.0
        assert batch.labels is batch.tokens


# --- several sets ----------------------------------------------------------------------------------------

WORDS = ["an", "evening", "of", "long", "words", "and", "short", "ones", "without", "end"]


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


@pytest.mark.parametrize("weights", [(1, 1), (1, 1000), (0.001, 5, 2), (3, 2, 1)])
def test_shares_add_up_and_leave_nobody_out(weights: tuple[float, ...]) -> None:
    counts = (40, 10, 3)[: len(weights)]
    given = divide_by_weight(counts, weights)
    assert sum(given) == sum(counts) and min(given) >= 1
    sampler = MixtureSampler(counts, given, seed=5)
    ends = np.cumsum(counts)
    for turn in range(2):
        drawn = [sampler.at(turn * sum(counts) + place) for place in range(sum(counts))]
        of = Counter(int(np.searchsorted(ends, at, side="right")) for at in drawn)
        assert tuple(of[number] for number in range(len(counts))) == given


def test_what_is_held_out_is_of_every_set_and_what_is_read_of_each_is_told(tmp_path: Path) -> None:
    written = mixed(tmp_path, a=1, b=3).model_copy(update={"validation": 0.3})
    prepared = made(tmp_path, written)
    assert prepared.validation is not None
    first = {chr(int(row[0])) for row in parts_of(prepared.validation, *range(len(prepared.validation)))[0]}
    assert first == {"a", "b"}
    told = [fact for _, fact in prepared.facts()]
    assert "text, 25.0% of training" in told and "text, 75.0% of training" in told
    other = mixed(tmp_path, a=1, b=2)
    assert made(tmp_path, other).key != made(tmp_path, mixed(tmp_path, a=1, b=3)).key


def test_a_file_is_not_trained_on_and_validated_with(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "a.jsonl", texts(3, "a"))
    with pytest.raises(ConfigError, match=r"data\.validation.*other files.*a\.jsonl in both"):
        made(tmp_path, data(file, validation=str(tmp_path)))


# --- documents that share a block -------------------------------------------------------------------------


def chats(folder: Path, count: int = 30) -> Path:
    draw = np.random.default_rng(0)

    def words(number: int) -> str:
        return " ".join(draw.choice(WORDS, number))

    rows = [{"prompt": words(2), "completion": words(1 + number % 5)} for number in range(count)]
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


class WithoutPositions(torch.nn.Linear):
    """A layer without an argument for positions."""


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Reading("document"), ""),
        (Reading("block"), "Reading, in which a document sees"),
        (WithoutPositions(4, 4), "WithoutPositions, whose `forward` takes no `position_ids`"),
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
