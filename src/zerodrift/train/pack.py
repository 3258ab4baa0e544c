"""Blocks of equal length in a memory map: made once, found again by what they are made of.

Packing puts documents one after the other, each with its end token, and cuts the stream; without packing a
document is a block of its own, cut or padded. A second map says which tokens are learned, where not all
are. The maps lie in a folder named by a digest of the files' contents and of every choice that matters.

Invariant: a folder that has its `blocks.json` is whole. It is written elsewhere and renamed, under a lock,
so that ranks and runs that want the same blocks make them once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerodrift.errors import ConfigError, Problems
from zerodrift.files import opened
from zerodrift.train import chat, documents
from zerodrift.train.blocks import Blocks, Maps, open_blocks, open_tokens, read_index
from zerodrift.train.job import Data
from zerodrift.train.tokens import Tokenizer, Tokens

VERSION = 2
"""Of what is written; another number finds nothing of this one's."""
SAMPLES, SAMPLE = 1024, 4096
"""Places in a token map that its digest is of, and bytes of each: a map may have terabytes."""
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data of a job."""

    train: Blocks
    validation: Blocks | None
    kind: str
    """`text`, `chat` or `tokens`."""
    key: str
    """Digest of all that the blocks depend on."""
    notes: tuple[str, ...] = ()
    """What became of documents that do not fit."""


def prepare(data: Data, tokenizer: Tokenizer, cache: Path) -> Prepared:
    """The blocks of a job, made if they are not there."""
    train = documents.find(data.train, data.pattern, "data.train")
    named = () if isinstance(data.validation, float) else data.validation
    held = documents.find(named, data.pattern, "data.validation")
    kind = documents.format_of(train, data)
    if kind == "tokens":
        return _token_maps(train, held, data, tokenizer)
    cache.mkdir(parents=True, exist_ok=True)
    before = _stamps((*train, *held))
    key = _key(train, held, data, tokenizer, kind, cache)
    folder = cache / key
    with _locked(cache / f"{key}.lock"):
        if not (folder / Maps.INDEX).is_file():
            _make(folder, [(TRAIN, train), (VALIDATION, held)], data, tokenizer, kind)
            _require_unchanged(before, _stamps((*train, *held)), folder)
    blocks, validation = open_blocks(folder, TRAIN), open_blocks(folder, VALIDATION)
    notes = _notes(read_index(folder))
    if not len(blocks):
        raise _too_little("data.train", "; ".join((f"less than {data.block} tokens", *notes)))
    if isinstance(data.validation, float) and data.validation and not len(validation):
        # Too few documents for one of them to be chosen, a single text for example: its last blocks are.
        if len(blocks) == 1:
            raise _too_little("data.validation", "one block in all, which is trained on")
        blocks, validation = blocks.split(data.validation)
    if held and not len(validation):
        raise _too_little("data.validation", f"less than {data.block} tokens")
    return Prepared(blocks, validation if len(validation) else None, kind, key, notes)


def _stamps(files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of each."""
    stamps = {}
    for file in files:
        with documents.readable(file):
            stat = file.stat()
        stamps[file] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def _require_unchanged(
    before: Mapping[Path, tuple[int, int]], now: Mapping[Path, tuple[int, int]], folder: Path
) -> None:
    """That blocks are of what their name says: the files were read twice, for their digest and for them."""
    problems = Problems()
    for file, stamp in now.items():
        if stamp != before[file]:
            problems.add(str(file), "must stay as it is while it is read", got="another size or time")
    if problems:
        shutil.rmtree(folder, ignore_errors=True)
    problems.raise_as(ConfigError)


def _too_little(where: str, got: str) -> ConfigError:
    must, todo = "must fill at least one block", "Name more files, or lower `data.block`."
    return ConfigError(where, must, got=got, do=todo)


def _notes(index: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if cut := index["cut"]:
        notes.append(f"documents longer than a block, which are cut: {cut:,}")
    if left := index["left"]:
        notes.append(f"blocks with nothing to learn, which are left out: {left:,}")
    return tuple(notes)


def _token_maps(train: Sequence[Path], held: Sequence[Path], data: Data, tokenizer: Tokenizer) -> Prepared:
    share = data.validation if isinstance(data.validation, float) else 0.0
    blocks = open_tokens(train, data.token_dtype, data.block, tokenizer.vocabulary)
    validation = open_tokens(held, data.token_dtype, data.block, tokenizer.vocabulary) if held else None
    if not len(blocks):
        raise _too_little("data.train", f"less than {data.block} tokens")
    if validation is not None and not len(validation):
        raise _too_little("data.validation", f"less than {data.block} tokens")
    if share:
        blocks, validation = blocks.split(share)
        if not len(validation):
            raise _too_little("data.validation", "files of one block each, which are trained on")
    stamp = [_sampled(file) for file in (*train, *held)]
    key = hashlib.blake2b(json.dumps([stamp, data.block, share]).encode(), digest_size=12).hexdigest()
    return Prepared(blocks, validation, "tokens", key)


def _sampled(file: Path) -> str:
    """A digest of a file's size and of what is in it at places that are evenly spread."""
    size = file.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    step = max(SAMPLE, size // SAMPLES)
    with documents.readable(file), opened(file) as stream:
        for place in range(0, size, step):
            digest.update(os.pread(stream.fileno(), SAMPLE, place))
    return digest.hexdigest()


# --- the key ------------------------------------------------------------------------------------------


def _key(
    train: Sequence[Path],
    held: Sequence[Path],
    data: Data,
    tokenizer: Tokenizer,
    kind: str,
    cache: Path,
) -> str:
    digests = _Digests(cache / "digests.json")
    made_of = {
        "version": VERSION,
        "train": [digests.of(path) for path in train],
        "validation": [digests.of(path) for path in held],
        "share": data.validation if isinstance(data.validation, float) else 0.0,
        "seed": data.seed,
        "tokenizer": tokenizer.fingerprint,
        "kind": kind,
        "block": data.block,
        "pack": packs(data, kind),
        "keys": [data.field, data.messages, data.loss_on],
    }
    digests.save()
    return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=12).hexdigest()


def packs(data: Data, kind: str) -> bool:
    """Whether documents share blocks."""
    return kind != "chat" if data.pack is None else data.pack


class _Digests:
    """Of files' contents. A file of the same size and time is not read again."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._known: dict[str, str] = {}
        self._new = False
        with contextlib.suppress(OSError, ValueError, RecursionError), opened(file) as stream:
            known = json.loads(stream.read())
            if isinstance(known, dict):
                self._known = {stamp: digest for stamp, digest in known.items() if isinstance(digest, str)}

    def of(self, path: Path) -> str:
        stat = path.stat()
        stamp = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if stamp not in self._known:
            digest = hashlib.blake2b(digest_size=16)
            with documents.readable(path), opened(path) as file:
                while part := file.read(1 << 20):
                    digest.update(part)
            self._known[stamp] = digest.hexdigest()
            self._new = True
        return self._known[stamp]

    def save(self) -> None:
        if self._new:
            beside = self._file.with_suffix(f".{os.getpid()}")
            beside.write_text(json.dumps(self._known))
            beside.replace(self._file)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; the lock goes with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- making blocks ------------------------------------------------------------------------------------


def _make(
    folder: Path, parts: Sequence[tuple[str, Sequence[Path]]], data: Data, tokenizer: Tokenizer, kind: str
) -> None:
    beside = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        maps = Maps(beside, data.block, tokenizer.vocabulary)
        writers = {name: _Writer(maps, name, packs(data, kind), tokenizer.end) for name, _ in parts}
        share = data.validation if isinstance(data.validation, float) else 0.0
        for name, files in parts:
            for document in documents.documents(files, data, kind):
                held = share and name == TRAIN and document.share(data.seed) < share
                tokens, learned = _tokens(document, data, tokenizer)
                writers[VALIDATION if held else name].add(tokens, learned)
        for writer in writers.values():
            writer.close()
        maps.close()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _tokens(document: documents.Document, data: Data, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """Its tokens with the end, and which are learned."""
    if document.messages:
        return chat.written(document.messages, tokenizer, data.loss_on == "everything")
    tokens = np.append(tokenizer.encode(document.text).astype(np.int64), tokenizer.end)
    return tokens, np.ones(len(tokens), dtype=bool)


class _Writer:
    """Cuts what it is given into blocks."""

    def __init__(self, maps: Maps, part: str, pack: bool, end: int) -> None:
        self._maps, self._part, self._pack, self._end = maps, part, pack, end
        self._tokens: list[Tokens] = []
        self._learned: list[Tokens] = []
        self._held = 0

    def add(self, tokens: Tokens, learned: Tokens) -> None:
        self._tokens.append(tokens)
        self._learned.append(learned)
        self._held += len(tokens)
        if not self._pack or self._held >= 64 * self._maps.length:
            self._flush(pad=not self._pack)

    def _flush(self, pad: bool) -> None:
        """Write what is whole; the rest is padded, or waits for more."""
        length = self._maps.length
        tokens, learned = np.concatenate(self._tokens), np.concatenate(self._learned)
        if not self._pack:
            self._maps.cut += len(tokens) > length
            tokens, learned = tokens[:length], learned[:length]
        if pad and len(tokens) % length:
            room = length - len(tokens) % length
            tokens = np.append(tokens, np.full(room, self._end))
            learned = np.append(learned, np.zeros(room, dtype=bool))
        count = len(tokens) // length * length
        self._maps.write(self._part, tokens[:count].reshape(-1, length), learned[:count].reshape(-1, length))
        self._tokens, self._learned = [tokens[count:]], [learned[count:]]
        self._held = len(tokens) - count
        if not self._held:
            self._tokens, self._learned = [], []

    def close(self) -> None:
        if self._held:
            self._flush(pad=True)
