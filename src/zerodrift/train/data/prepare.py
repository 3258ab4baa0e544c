"""A job's data as blocks in a memory map: made once, found again by what they are made of.

The maps lie in a folder named by a digest of the files' contents and of every choice that matters. A job may
name several sets of data, which are mixed by weight; each has its own folder. How documents fill blocks is
`packing.py`'s affair.

Invariant: a folder that has its `blocks.json` is whole. It is written elsewhere and renamed, under a lock,
so that ranks and runs that want the same blocks make them once. Where a file system has no locks several
may make them, and the first that is done is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zerodrift.errors import ConfigError, Problems
from zerodrift.files import locked, opened
from zerodrift.train.data import chat_template as rendering
from zerodrift.train.data import documents, formats, long_texts
from zerodrift.train.data import warnings as noted
from zerodrift.train.data.blocks import Blocks, Maps, open_blocks, open_tokens, read_index
from zerodrift.train.data.files import TEXTS, TRAIN, VALIDATION, DataFiles, find
from zerodrift.train.data.mixture import Mixture
from zerodrift.train.data.packing import PartWriter, Way
from zerodrift.train.data.report import PartRead, Reading, line, lines
from zerodrift.train.data.texts import readable
from zerodrift.train.data.tokenizer import Tokenizer, Tokens
from zerodrift.train.loop.job import Data, Job

VERSION = 4
"""Of what is written; another number finds nothing of this one's."""
SAMPLES, SAMPLE = 1024, 4096
"""Places in a token map that its digest is of, and bytes of each: a map may have terabytes."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """The data of a job."""

    train: Blocks | Mixture
    validation: Blocks | Mixture | None
    key: str
    """Digest of all that the blocks depend on."""
    sets: tuple[Set, ...]
    """What they are made of: what is trained on, and files to validate with where there are any."""

    def in_short(self) -> list[tuple[str, str]]:
        """The same, with a line for each set."""
        if len(self.sets) == 1:
            return [("data", line(self.sets[0].reading))]
        trained = sum(each.weight or 0.0 for each in self.sets)
        shares = [f"{each.weight / trained:.1%}, " if each.weight else "" for each in self.sets]
        return [
            ("data", f"{each.name}: {share}{line(each.reading)}")
            for each, share in zip(self.sets, shares, strict=True)
        ]

    def told(self) -> list[tuple[str, str]]:
        """What was read, as facts with their names."""
        if len(self.sets) == 1:
            return lines(self.sets[0].reading)
        trained = sum(each.weight or 0.0 for each in self.sets)
        facts = []
        for each in self.sets:
            share = f", {each.weight / trained:.1%} of training" if each.weight else ""
            facts.append((each.name, f"{each.reading.kind}{share}"))
            facts += [(f"  {name}", fact) for name, fact in lines(each.reading)]
        return facts


@dataclass(frozen=True, slots=True)
class Set:
    """Some files, as blocks."""

    name: str
    """As they are written in the job."""
    weight: float | None
    """Its share of what is trained on, beside those of the others; None where it is the only one."""
    train: Blocks
    held: Blocks
    key: str
    reading: Reading


def require_validation(job: Job) -> None:
    """That there is something to evaluate on where that is asked for."""
    problems = Problems()
    run, todo = job.run, "Hold some out, with `data.validation: 0.02` say, or name files there."
    for key in ("evaluate_every", "evaluate_blocks", "export_best", "patience"):
        if (value := getattr(run, key)) and job.data.validation == 0.0:
            got = f"{str(value).lower()}, and no `data.validation`"
            problems.add(f"run.{key}", "must go with data to validate on", got=got, do=todo)
    if run.patience and not run.evaluate_every:
        todo = "Evaluate now and then, with `run.evaluate_every: 100` say."
        problems.add("run.patience", "must go with evaluations on the way", got=run.patience, do=todo)
    problems.raise_as(ConfigError)


def prepare(data: Data, tokenizer: Tokenizer, cache: Path) -> Prepared:
    """The blocks of a job, made if they are not there."""
    named = data.sets()
    share = data.validation if isinstance(data.validation, float) else 0.0
    weights = [weight for _, weight in named] if len(named) > 1 else [None]
    found = [find(paths, data, "data.train") for paths, _ in named]
    held_files = None
    if not isinstance(data.validation, float):
        held_files = find(data.validation, data, "data.validation", VALIDATION)
    sets = [
        _set(each, data, tokenizer, cache, share, weight, "data.train")
        for each, weight in zip(found, weights, strict=True)
    ]
    held = [each.held for each in sets if len(each.held)]
    if held_files is not None:
        _require_apart([path for each in found for path in each.files], held_files.files)
        other = _set(held_files, data, tokenizer, cache, 0.0, None, "data.validation")
        if other.reading.kind not in [each.reading.kind for each in sets]:
            must = f"must be {sets[0].reading.kind}, as `data.train` is"
            raise ConfigError("data.validation", must, got=other.reading.kind)
        held, sets = [other.train], [*sets, replace(_with_shared(other, sets, cache), name="validation")]
    trained = [each for each in sets if each.name != "validation"]
    key = sets[0].key
    if len(sets) > 1:
        made_of = [[each.key, each.weight] for each in sets]
        key = hashlib.blake2b(json.dumps(made_of).encode(), digest_size=12).hexdigest()
    train: Blocks | Mixture = trained[0].train
    if len(trained) > 1:
        train = Mixture(tuple(each.train for each in trained), tuple(each.weight or 1.0 for each in trained))
    validation = held[0] if len(held) == 1 else Mixture(tuple(held), (1.0,) * len(held)) if held else None
    return Prepared(train, validation, key, tuple(sets))


def _with_shared(held: Set, sets: Sequence[Set], cache: Path) -> Set:
    """Files to validate with, with a note of how many of their documents are trained on."""
    if held.reading.kind == "tokens":
        return held
    trained = [(cache / each.key, each.reading.train.documents) for each in sets]
    count = noted.shared((cache / held.key, held.reading.train.documents), trained)
    notes = {**held.reading.noted, **({noted.TRAINED_ON: count} if count else {})}
    return replace(held, reading=replace(held.reading, noted=notes))


def _require_apart(train: Sequence[Path], held: Sequence[Path]) -> None:
    """That no file is trained on and validated with."""
    if both := {path.resolve() for path in train} & {path.resolve() for path in held}:
        got = f"{min(both)} in both"
        raise ConfigError("data.validation", "must name other files than `data.train`", got=got)


def _set(
    found: DataFiles,
    data: Data,
    tokenizer: Tokenizer,
    cache: Path,
    share: float,
    weight: float | None,
    where: str,
) -> Set:
    name = str(found.files[0]) if len(found.files) == 1 else f"{found.files[0].parent}"
    kind = documents.kind_of(found.files, data)
    if kind == "tokens":
        return _token_maps(found, data, tokenizer, share, weight, where)
    cache.mkdir(parents=True, exist_ok=True)
    before = _stamps(found.files)
    key = _key(found.files, share, data, tokenizer, kind, cache)
    folder = cache / key
    with locked(cache / f"{key}.lock") as alone:
        if not (folder / Maps.INDEX).is_file():
            if alone:
                _remove_unfinished(folder)
            _make(folder, found.files, share, data, tokenizer, kind)
            _require_unchanged(before, _stamps(found.files), folder)
    train, held = open_blocks(folder, TRAIN), open_blocks(folder, VALIDATION)
    reading = replace(Reading.of(read_index(folder)["reading"]), beside=found.left)
    if share and not len(train):
        # Of very few documents all may have been chosen, a single text for example: then none is.
        train, held, reading = held, train, replace(reading, train=reading.held, held=reading.train)
    if not len(train):
        got = "nothing to learn" if reading.left or reading.train.documents else "no documents"
        raise _too_little(where, "; ".join((got, *reading.reasons())))
    if share and not len(held):
        # Too few documents for one of them to be chosen, a single text for example: its last blocks are.
        if len(train) == 1:
            raise _too_little("data.validation", "one block in all, which is trained on")
        train, held = train.split(share)
        labels, count = int(held.labels(np.arange(len(held))).sum()), len(held)
        tokens = min(count * data.block, labels + count)
        last = PartRead(0, tokens, tokens, count, count * data.block - tokens)
        reading = reading.with_last_blocks_held(last)
    return Set(name, weight, train, held, key, reading)


def _stamps(files: Sequence[Path]) -> dict[Path, tuple[int, int]]:
    """Size and time of each."""
    stamps = {}
    for file in files:
        with readable(file):
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


def _token_maps(
    found: DataFiles, data: Data, tokenizer: Tokenizer, share: float, weight: float | None, where: str
) -> Set:
    problems = Problems()
    for file in found.files:
        if formats.suffix_of(file) in (*formats.OF_ROWS, *TEXTS, ".json"):
            problems.add(
                file, "must be a map of token numbers, `.npy` or `.bin`", got="text or rows by its name"
            )
    problems.raise_as(ConfigError)
    blocks = open_tokens(found.files, data.token_dtype, data.block, tokenizer.vocabulary)
    if not len(blocks):
        raise _too_little(where, f"less than {data.block} tokens")
    held = Blocks((), None, None, data.block, tokenizer.vocabulary)
    if share:
        blocks, held = blocks.split(share)
        if not len(held):
            raise _too_little("data.validation", "files of one block each, which are trained on")
    stamp = [_sampled(file) for file in found.files]
    key = hashlib.blake2b(json.dumps([stamp, data.block, share]).encode(), digest_size=12).hexdigest()
    parts = [PartRead(0, size * data.block, size * data.block, size) for size in (len(blocks), len(held))]
    reading = Reading("tokens", len(found.files), data.block, parts[0], parts[1], beside=found.left)
    return Set(str(found.files[0]), weight, blocks, held, key, reading)


def _sampled(file: Path) -> str:
    """A digest of a file's size and of what is in it at places that are evenly spread."""
    size = file.stat().st_size
    digest = hashlib.blake2b(size.to_bytes(8, "little"), digest_size=16)
    step = max(SAMPLE, size // SAMPLES)
    with readable(file), opened(file) as stream:
        for place in range(0, size, step):
            digest.update(os.pread(stream.fileno(), SAMPLE, place))
    return digest.hexdigest()


# --- the key ------------------------------------------------------------------------------------------


def _key(
    files: Sequence[Path], share: float, data: Data, tokenizer: Tokenizer, kind: str, cache: Path
) -> str:
    digests = _Digests(cache / "digests.json")
    made_of = {
        "version": VERSION,
        "files": [digests.of(path) for path in files],
        "suffixes": [formats.suffix_of(path) for path in files],
        "share": share,
        "seed": data.seed,
        "tokenizer": tokenizer.fingerprint,
        "kind": kind,
        "whole": data.format == "files",
        "block": data.block,
        "way": way(data, kind),
        "apart": is_apart(data, kind),
        "keys": [data.field, data.messages, data.loss_on],
    }
    digests.save()
    return hashlib.blake2b(json.dumps(made_of, sort_keys=True).encode(), digest_size=12).hexdigest()


def way(data: Data, kind: str) -> Way:
    """How documents come into blocks."""
    if kind == "chat":
        return "whole" if data.pack else "alone"
    return "alone" if data.pack is False else "stream"


def is_apart(data: Data, kind: str) -> bool:
    """Whether documents that share a block do not see each other."""
    return data.attend == "document" and way(data, kind) != "alone"


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
            with readable(path), opened(path) as file:
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


# --- making blocks ------------------------------------------------------------------------------------


def _remove_unfinished(folder: Path) -> None:
    """What makers that were killed have left beside it."""
    for left in folder.parent.glob(f"{folder.name}.*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


def _make(
    folder: Path, files: Sequence[Path], share: float, data: Data, tokenizer: Tokenizer, kind: str
) -> None:
    beside = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}")
    beside.mkdir()
    maps = Maps(beside, data.block, tokenizer.vocabulary, is_apart(data, kind))
    try:
        writers = [PartWriter(maps, part, way(data, kind), tokenizer.end) for part in (TRAIN, VALIDATION)]
        seen = documents.Seen()
        watch = noted.DocumentWatch(tokenizer, seen)
        for document in documents.documents(files, data, kind, seen):
            number = document.number(data.seed)
            held = number / 2**64 < share
            if not held:
                watch.take(number)
            writers[held].add(watch.watched(document, tokens_of(document, data, tokenizer)))
        watch.close(beside)
        train, other = (writer.close() for writer in writers)
        reading = Reading(
            kind,
            len(files),
            data.block,
            train,
            other,
            forms=dict(seen.forms),
            left=dict(seen.left),
            noted=dict(seen.noted),
            cut=sum(writer.cut for writer in writers),
            cut_tokens=sum(writer.cut_tokens for writer in writers),
            empty_blocks=sum(writer.empty_blocks for writer in writers),
            unread=tuple(seen.unread),
        )
        maps.close(reading.to_json())
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / Maps.INDEX).is_file():
                raise
    finally:
        maps.release()
        shutil.rmtree(beside, ignore_errors=True)


def tokens_of(
    document: documents.Document, data: Data, tokenizer: Tokenizer
) -> Iterator[tuple[Tokens, Tokens]]:
    """Its tokens with the end, and which are learned; piece by piece where it is a text."""
    everything = data.loss_on == "everything"
    if document.talk is not None:
        yield rendering.written(document.talk, tokenizer, everything)
        return
    given = 0 if everything else document.given
    start = np.array(tokenizer.start, np.int64)
    yield start, np.full(len(start), not given)
    if given:
        span = (given, len(document.text))
        yield rendering.marked(document.text, [span], tokenizer, document.where)
    else:
        for tokens in long_texts.encoded(document.pieces(), tokenizer):
            yield tokens, np.ones(len(tokens), dtype=bool)
    yield np.array([tokenizer.end]), np.array([True])
