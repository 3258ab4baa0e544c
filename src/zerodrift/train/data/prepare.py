"""Prepare a job's data as blocks on disk, which are made once and cached.

The folder of blocks is named by a digest of the files' contents and of every setting that changes the blocks.
Each of several sets has its own folder. A folder with an index is complete: it is written under another name
and renamed. A lock keeps ranks and runs from making the same blocks twice. On a file system without locks
several may make them, and the first folder that is complete is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from zerodrift import record
from zerodrift.checkpoint import full_disk_named
from zerodrift.errors import ConfigError, Problems
from zerodrift.files import locked, opened
from zerodrift.train.data import chat_template, documents, formats
from zerodrift.train.data.blocks import INDEX, Blocks, open_blocks, open_tokens, read_index, write_index
from zerodrift.train.data.files import TEXTS, TRAIN, VALIDATION, DataFiles, find
from zerodrift.train.data.formats import readable
from zerodrift.train.data.packing import DataCounts, Packing, PartCounts, PartWriter
from zerodrift.train.data.sampling import Mixture, joined
from zerodrift.train.data.tokenizer import Tokenizer, Tokens, encode_pieces
from zerodrift.train.job import Data, Job

VERSION = 4
"""Version of the folders of blocks: folders of other versions are not found."""
SHORTER = "Name more files, or lower `data.block`."
"""Advice where blocks are cut out of one stream of tokens."""
SAMPLES, SAMPLE = 1024, 4096
"""Places of a token map that its digest covers, and bytes of each: a map may have terabytes."""


@dataclass(frozen=True, slots=True)
class PreparedData:
    train: Blocks | Mixture
    validation: Blocks | Mixture | None
    key: str
    """Digest of all that the blocks depend on."""
    sets: tuple[DataSource, ...]
    """Training sets, and the validation files if there are any."""

    @property
    def is_chat(self) -> bool:
        """Whether all data are conversations."""
        return all(each.counts.kind == "chat" for each in self.sets)

    def lines(self) -> list[tuple[str, str]]:
        if len(self.sets) == 1:
            return [("data", self.sets[0].counts.line())]
        shares = [f"{self._share(each)}, " if each.weight else "" for each in self.sets]
        named = zip(self.sets, shares, strict=True)
        return [("data", f"{each.name}: {share}{each.counts.line()}") for each, share in named]

    def facts(self) -> list[tuple[str, str]]:
        if len(self.sets) == 1:
            return self.sets[0].counts.facts()
        facts = []
        for each in self.sets:
            of_training = f", {self._share(each)} of training" if each.weight else ""
            facts.append(("set", f"{each.name}: {each.counts.kind}{of_training}"))
            facts += [(f"  {name}", fact) for name, fact in each.counts.facts()]
        return facts

    def _share(self, source: DataSource) -> str:
        return f"{(source.weight or 0.0) / sum(each.weight or 0.0 for each in self.sets):.1%}"


@dataclass(frozen=True, slots=True)
class DataSource:
    name: str
    weight: float | None
    """Share of training beside the weights of others; None for the only set."""
    train: Blocks | Mixture
    held: Blocks | Mixture | None
    key: str
    counts: DataCounts


def require_validation(job: Job) -> None:
    """Refuse keys that need validation data in a job without them."""
    problems = Problems()
    run, todo = job.run, "Hold some out, with `data.validation: 0.02` say, or name files there."
    for key in ("evaluate_every", "evaluate_blocks", "export_best", "patience"):
        if (value := getattr(run, key)) and job.data.validation == 0.0:
            got = f"{str(value).lower()}, and no `data.validation`"
            problems.add(f"run.{key}", "must come with `data.validation`", got=got, do=todo)
    if run.patience and not run.evaluate_every:
        todo = "Evaluate now and then, with `run.evaluate_every: 100` say."
        problems.add("run.patience", "must come with `run.evaluate_every`", got=run.patience, do=todo)
    problems.raise_as(ConfigError)


def prepare(data: Data, tokenizer: Tokenizer, cache: Path) -> PreparedData:
    """Return the blocks of a job, made if they are not in the cache."""
    named = data.sets()
    share = data.validation if isinstance(data.validation, float) else 0.0
    found = [find(paths, data, "data.train") for paths, _ in named]
    held_files = None
    if not isinstance(data.validation, float):
        held_files = find(data.validation, data, "data.validation", VALIDATION)
    maker = _Maker(data, tokenizer, cache)
    with full_disk_named(cache):
        trained = [
            maker.source(files, share, weight if len(named) > 1 else None, "data.train")
            for files, (_, weight) in zip(found, named, strict=True)
        ]
    sets, held = trained, [each.held for each in trained if each.held is not None]
    if held_files is not None:
        every = {path.resolve() for files in found for path in files.files}
        if both := every & {path.resolve() for path in held_files.files}:
            must, got = "must name other files than `data.train`", f"{min(both)} in both"
            raise ConfigError("data.validation", must, got=got)
        with full_disk_named(cache):
            other = maker.source(held_files, 0.0, None, "data.validation")
        if other.counts.kind not in [each.counts.kind for each in trained]:
            must = f"must be {trained[0].counts.kind}, as `data.train` is"
            raise ConfigError("data.validation", must, got=other.counts.kind)
        counts = other.counts
        if counts.kind != "tokens":
            folders = [(cache / each.key, each.counts.train.documents) for each in (other, *trained)]
            if shared := documents.shared_documents(folders[0], folders[1:]):
                counts = replace(counts, noted={**counts.noted, documents.TRAINED_ON: shared})
        other = replace(other, name="validation", counts=counts)
        held, sets = [other.train], [*trained, other]
    key = sets[0].key if len(sets) == 1 else _digest([[each.key, each.weight] for each in sets])
    train = trained[0].train
    if len(trained) > 1:
        train = Mixture(tuple(each.train for each in trained), tuple(each.weight or 1.0 for each in trained))
    return PreparedData(train, joined(held), key, tuple(sets))


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=12).hexdigest()


def packing_of(data: Data, kind: str) -> Packing:
    if kind in ("chat", "prompts"):
        return "whole" if data.pack else "alone"
    return "alone" if data.pack is False else "stream"


def has_separate_documents(data: Data, kind: str) -> bool:
    """Return True if documents that share a block do not see each other."""
    return data.attend == "document" and packing_of(data, kind) != "alone"


@dataclass(frozen=True, slots=True)
class _Maker:
    data: Data
    tokenizer: Tokenizer
    cache: Path

    def source(self, found: DataFiles, share: float, weight: float | None, where: str) -> DataSource:
        """Return the blocks of some files, of which `share` of the documents is held out."""
        files, data = found.files, self.data
        kind = documents.kind_of(files, data)
        if kind == "tokens":
            return self._token_maps(found, share, weight, where)
        name = str(files[0]) if len(files) == 1 else f"{files[0].parent}"
        self.cache.mkdir(parents=True, exist_ok=True)
        before = _stamps(files)
        key = self._key(files, share, kind)
        folder = self.cache / key
        with locked(self.cache / f"{key}.lock") as is_alone:
            if not (folder / INDEX).is_file():
                if is_alone:  # folders that killed processes left incomplete
                    for left in filter(Path.is_dir, folder.parent.glob(f"{folder.name}*")):
                        shutil.rmtree(left, ignore_errors=True)
                _make_blocks(folder, files, share, data, self.tokenizer, kind)
                now = _stamps(files)
                problems = Problems()
                for file in (file for file in now if now[file] != before[file]):
                    must = "must not change while it is read"
                    problems.add(str(file), must, got="another size or time")
                if problems:
                    shutil.rmtree(folder, ignore_errors=True)
                problems.raise_as(ConfigError)
        train, held = open_blocks(folder, TRAIN), open_blocks(folder, VALIDATION)
        counts = replace(record.decode(DataCounts, read_index(folder)["reading"]), beside=found.left)
        if share and train is None:
            # All of very few documents may have been drawn. Then none of them is held out.
            train, held, counts = held, train, replace(counts, train=counts.held, held=counts.train)
        if train is None:
            got = "nothing to learn" if counts.left or counts.train.documents else "no documents"
            todo = "Raise `data.block`." if counts.cut else "Name more files."
            raise _too_little(where, "; ".join((got, *counts.cuts(), *counts.reasons())), todo)
        if share and held is None:
            # None of very few documents may have been drawn. Then the last blocks are held out.
            if len(train) == 1:
                todo = SHORTER if packing_of(data, kind) == "stream" else "Name more files."
                raise _too_little("data.validation", "one block in all, which is used for training", todo)
            train, held = train.split(share)
            labels, count = int(held.labels(np.arange(len(held))).sum()), len(held)
            tokens = min(count * data.block, labels + count)
            last = PartCounts(0, tokens, tokens, count, count * data.block - tokens)
            before_last = {key: getattr(counts.train, key) - value for key, value in asdict(last).items()}
            counts = replace(counts, train=PartCounts(**before_last), held=last)
        return DataSource(name, weight, train, held, key, counts)

    def _token_maps(self, found: DataFiles, share: float, weight: float | None, where: str) -> DataSource:
        length, vocabulary = self.data.block, self.tokenizer.vocabulary
        problems = Problems()
        for file in found.files:
            if formats.suffix_of(file) in (*formats.OF_ROWS, *TEXTS, ".json"):
                must = "must be a map of token numbers, `.npy` or `.bin`"
                problems.add(file, must, got="text or rows by its name")
        problems.raise_as(ConfigError)
        blocks = joined(open_tokens(found.files, self.data.token_dtype, length, vocabulary))
        if blocks is None:
            raise _too_little(where, f"less than {length} tokens")
        held: Blocks | Mixture | None = None
        if share:
            blocks, held = blocks.split(share)
            if not held:
                raise _too_little("data.validation", "files of one block each, which are used for training")
        key = _digest([[_sampled(file) for file in found.files], length, share])
        sizes = len(blocks), len(held or ())
        parts = [PartCounts(0, size * length, size * length, size) for size in sizes]
        counts = DataCounts("tokens", len(found.files), length, parts[0], parts[1], beside=found.left)
        return DataSource(str(found.files[0]), weight, blocks, held, key, counts)

    def _key(self, files: Sequence[Path], share: float, kind: str) -> str:
        data = self.data
        made_of = {
            "version": VERSION,
            "files": _digests_of(files, self.cache / "digests.json"),
            "suffixes": [formats.suffix_of(path) for path in files],
            "share": share,
            "seed": data.seed,
            "tokenizer": self.tokenizer.fingerprint,
            "kind": kind,
            "whole": data.format == "files",
            "block": data.block,
            "way": packing_of(data, kind),
            "apart": has_separate_documents(data, kind),
            "keys": [data.field, data.messages, data.loss_on],
        }
        return _digest(made_of)


def _too_little(where: str, got: str, todo: str = SHORTER) -> ConfigError:
    return ConfigError(where, "must fill at least one block", got=got, do=todo)


def _stamps(files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    stamps = {}
    for file in files:
        with readable(file):
            stat = file.stat()
        stamps[file] = (stat.st_size, stat.st_mtime_ns)
    return stamps


def _sampled(file: Path) -> str:
    """Return a digest of a file's size and of evenly spread places in it."""
    size = file.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    with readable(file), opened(file) as stream:
        for place in range(0, size, max(SAMPLE, size // SAMPLES)):
            digest.update(os.pread(stream.fileno(), SAMPLE, place))
    return digest.hexdigest()


def _digests_of(files: Sequence[Path], kept: Path) -> list[str]:
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, RecursionError), opened(kept) as stream:
        read = json.loads(stream.read())
        known = read if isinstance(read, dict) else {}
    digests, before = [], len(known)
    for path in files:
        stat = path.stat()
        stamp = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
        if not isinstance(known.get(stamp), str):
            digest = hashlib.blake2b(digest_size=16)
            with readable(path), opened(path) as file:
                while part := file.read(1 << 20):
                    digest.update(part)
            known[stamp] = digest.hexdigest()
        digests.append(known[stamp])
    if len(known) > before:
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(known))
        beside.replace(kept)
    return digests


def _make_blocks(
    folder: Path, files: Sequence[Path], share: float, data: Data, tokenizer: Tokenizer, kind: str
) -> None:
    beside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    beside.mkdir()
    counts, is_apart = DataCounts(kind, len(files), data.block), has_separate_documents(data, kind)
    how = (tokenizer, packing_of(data, kind), is_apart, counts)
    writers = [
        PartWriter(beside / part, *how, of_part)
        for part, of_part in ((TRAIN, counts.train), (VALIDATION, counts.held))
    ]
    try:
        watch = documents.DocumentWatch(tokenizer, counts.noted, data.seed)
        for document in documents.read_documents(files, data, counts):
            writer = writers[watch.is_held_out(document, share)]
            writer.add(watch.watched(document, tokens_of(document, data, tokenizer)))
        watch.close(beside)
        parts = {part: writer.close() for part, writer in zip((TRAIN, VALIDATION), writers, strict=True)}
        reading = record.encode(counts)
        write_index(beside, data.block, tokenizer.vocabulary, parts, apart=is_apart, reading=reading)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / INDEX).is_file():
                raise
    finally:
        with contextlib.ExitStack() as stack:  # a full disk may refuse to close a file
            stack.callback(shutil.rmtree, beside, ignore_errors=True)
            for writer in writers:
                stack.callback(writer.release)


def tokens_of(
    document: documents.Document, data: Data, tokenizer: Tokenizer
) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield a document's tokens with its end, and which of them are learned."""
    learn_all = data.loss_on == "everything"
    if document.talk is not None:
        yield chat_template.encode_conversation(document.talk, tokenizer, learn_all)
        return
    given = 0 if learn_all else document.given
    start = np.array(tokenizer.start, np.int64)
    yield start, np.full(len(start), not given)
    if given:
        # What is learned begins where the tokens of the prompt alone end or differ, as in TRL.
        tokens, alone = tokenizer.encode(document.text), tokenizer.encode(document.text[:given])
        shared = min(len(tokens), len(alone))
        differing = np.flatnonzero(tokens[:shared] != alone[:shared])
        yield tokens, np.arange(len(tokens)) >= (differing[0] if len(differing) else shared)
        if len(tokens) and tokens[-1] == tokenizer.end:
            return  # the completion ends by itself
    else:
        for tokens in encode_pieces(document.pieces(), tokenizer):
            yield tokens, np.ones(len(tokens), dtype=bool)
    yield np.array([tokenizer.end]), np.array([True])
