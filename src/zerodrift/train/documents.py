"""Documents out of files: a text, a row with a text, a row with a conversation.

Which files there are is `find.py`'s affair, what is in one is `formats.py`'s, and tokens are `pack.py`'s.
Order is that of the files and their rows; which documents are held out is decided by what is in them, so it
is the same whatever else is there.

Invariant: every row of every file is a document, is counted with the reason for which it is none, or is
refused by its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerodrift.errors import ConfigError
from zerodrift.train import chat, formats, texts
from zerodrift.train.chat import Conversation
from zerodrift.train.find import MAPS
from zerodrift.train.job import Data
from zerodrift.train.json_rows import Row

COLUMNS = ("content", "document", "body", "article", "story", "passage", "code")
"""What a column of texts is called where it is not `text`."""
NO_ANSWER, EMPTY = "without a turn of the assistant to learn", "empty"
"""Why a document is left out."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text or one conversation."""

    text: str = ""
    talk: Conversation | None = None
    given: int = 0
    """Characters at the start of the text that are there to be continued, and not learned."""
    where: str = ""
    """Its file, and row."""

    def share(self, seed: int) -> float:
        """A number in [0, 1) that depends on what is in it and on the seed."""
        digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
        for part in (self.text, *(_part(turn[key]) for turn in self._turns for key in turn)):
            digest.update(part.encode() + b"\0")
        return int.from_bytes(digest.digest(), "little") / 2**64

    @property
    def _turns(self) -> Sequence[Mapping[str, Any]]:
        return self.talk.messages if self.talk is not None else ()


def _part(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


@dataclass
class Seen:
    """What was met in the files of one part."""

    documents: int = 0
    forms: Counter[str] = field(default_factory=Counter)
    """What documents were made of, in words, with how many."""
    left: Counter[str] = field(default_factory=Counter)
    """Reasons for which documents were left out, with how many."""
    unread: dict[str, None] = field(default_factory=dict)
    """Columns of rows that say nothing here."""


def kind_of(files: Sequence[Path], data: Data) -> str:
    """What `data.format: auto` means: `text`, `chat` or `tokens`, by the files and the first row."""
    if data.format != "auto":
        return "text" if data.format == "files" else data.format
    maps = [file.suffix.lower() in MAPS for file in files]
    if all(maps):
        return "tokens"
    if any(maps):
        mixed = files[maps.index(True)]
        must, todo = "must not mix token maps with other files", "Name one kind, or set `data.format`."
        raise ConfigError("data.train", must, got=str(mixed), do=todo)
    for file in files:
        kind = formats.format_of(file)
        if kind == formats.TEXT:
            continue
        with contextlib.closing(formats.rows(file, kind)) as rows:
            _, row = next(rows, (0, None))
        if row is not None:
            named = (data.field or "text") in row
            return "chat" if chat.is_conversation(row, data.messages) and not named else "text"
    return "text"


def documents(files: Sequence[Path], data: Data, kind: str, seen: Seen) -> Iterator[Document]:
    """Every document, in order. What they are is added to `seen`."""
    column = ""
    for file in files:
        holds = formats.TEXT if data.format == "files" else formats.format_of(file)
        if holds == formats.TEXT:
            if kind == "chat":
                must = "must be rows of conversations: JSON, JSON lines, CSV, parquet or Arrow"
                raise ConfigError(str(file), must, got="a text")
            found = Document(formats.text(file), where=str(file))
            yield from _counted(found, "a text per file", seen)
            continue
        for number, row in formats.rows(file, holds):
            where = f"{file}:{number}"
            if kind == "chat":
                yield from _conversation(row, data, where, seen)
                continue
            column = column or _column(row, data.field, where)
            yield from _of_text(row, column, where, seen)


def _counted(document: Document, form: str, seen: Seen) -> Iterator[Document]:
    seen.documents += 1
    seen.forms[form] += 1
    if document.text.strip() or document.talk is not None:
        yield document
    else:
        seen.left[EMPTY] += 1


def _conversation(row: Row, data: Data, where: str, seen: Seen) -> Iterator[Document]:
    talk = chat.conversation(row, data.messages, where)
    seen.unread |= dict.fromkeys(key for key in row if key not in talk.columns)
    if data.loss_on == "answers" and not talk.answers:
        seen.documents += 1
        seen.left[NO_ANSWER] += 1
        return
    yield from _counted(Document(talk=talk, where=where), talk.form, seen)


# --- texts of rows --------------------------------------------------------------------------------------

CONTINUED = "prompt"
"""What `_column` says of rows with a text to be continued and its continuation."""


def _column(row: Row, field: str, where: str) -> str:
    """The column of rows that has the text: the one that is named, `text`, or the only one."""
    if field:
        return field
    if "text" in row:
        return "text"
    if row.keys() >= {"prompt", "completion"}:
        return CONTINUED
    if row.keys() >= {"chosen", "rejected"}:
        must, todo = "must be texts or conversations", "TRL trains on preferences: see docs/migrating.md."
        raise ConfigError(where, must, got="preferences: `chosen` and `rejected`", do=todo)
    texts = [key for key, held in row.items() if isinstance(held, str)]
    known = texts if len(texts) == 1 else [key for key in COLUMNS if key in texts]
    if len(known) != 1 or known[0] in chat.ASKED:
        got = ", ".join(f"`{key}`" for key in row) or "nothing"
        todo = "Name the column in `data.field`."
        raise ConfigError(where, "must have a text in `text`, or in one column", got=got, do=todo)
    return known[0]


def _of_text(row: Row, column: str, where: str, seen: Seen) -> Iterator[Document]:
    if column == CONTINUED and "completion" in row and "prompt" in row:
        asked, answered = (chat.text_of(row, key, where) for key in ("prompt", "completion"))
        seen.unread |= dict.fromkeys(key for key in row if key not in ("prompt", "completion"))
        document = Document(asked + answered, given=len(asked), where=where)
        yield from _counted(document, "`prompt` continued by `completion`", seen)
        return
    if not isinstance(row.get(column), str):
        there = column in row
        got = texts.kind(row[column]) if there else ", ".join(f"`{key}`" for key in row) or "nothing"
        todo = "Name the column in `data.field`."
        raise ConfigError(where, f"must have a text in `{column}`", got=got, do=todo)
    seen.unread |= dict.fromkeys(key for key in row if key != column)
    document = Document(chat.text_of(row, column, where), where=where)
    yield from _counted(document, f"`{column}` of rows", seen)
