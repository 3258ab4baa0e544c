"""Read documents from files: whole texts, texts of rows, and conversations of rows. Count warnings.

`files` finds the files, `rows` reads them, and `prepare` turns documents into tokens. Documents come in the
order of files and rows. Whether a document is held out depends only on its content and the seed.

Every row becomes a document, is counted with the reason why it is left out, or is refused by its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerodrift.errors import ConfigError, first_line
from zerodrift.train.data import conversation as chat
from zerodrift.train.data import formats
from zerodrift.train.data.blocks import damaged
from zerodrift.train.data.conversation import Conversation, names
from zerodrift.train.data.files import TOKEN_SUFFIXES
from zerodrift.train.data.packing import DataCounts
from zerodrift.train.data.rows import Row, read_rows
from zerodrift.train.data.tokenizer import Tokenizer, Tokens
from zerodrift.train.job import Data

TEXT_COLUMNS = ("content", "document", "body", "article", "story", "passage", "code")
"""Usual names of a column of texts, beside `text`."""
CONTINUED = ("prompt", "completion")
PIECE = 1 << 16
_NAME_IT = "Name a column of texts in `data.field`, or one of turns in `data.messages`."
_BY_TRL = "TRL trains on preferences: see docs/recipes.md."
NO_ANSWER, EMPTY = "without a turn of the assistant to learn", "empty"
"""Reasons why a document is left out."""
SILENT = "with an answer of nothing, which is not learned"
TRAINED_ON, TWICE = "trained on as well", "like another one"
SPELLED = "with `{}` in the text, which becomes the mark that it spells"
UNTEMPLATED = "written with `<|role|>` in front of each turn: the tokenizer has no chat template"
DIGESTS = "documents"
"""File with the digest of each training document."""
_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Document:
    text: str = ""
    talk: Conversation | None = None
    given: int = 0
    """Number of characters at the start of the text that are a prompt and not learned."""
    file: Path | None = None
    """The file that is the text. It is read piece by piece, since it may be larger than memory."""

    def number(self, seed: int) -> int:
        """Return a 64-bit digest of the content and the seed."""
        digest = hashlib.blake2b(digest_size=8, key=seed.to_bytes(8, "little"))
        for piece in self.pieces():
            digest.update(piece.encode())
        digest.update(b"\0")
        for value in (value for turn in (self.talk.messages if self.talk else ()) for value in turn.values()):
            part = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            digest.update(part.encode() + b"\0")
        return int.from_bytes(digest.digest(), "little")

    def pieces(self) -> Iterator[str]:
        if self.file is not None:
            yield from formats.read_text(self.file)
        for at in range(0, len(self.text), PIECE):
            yield self.text[at : at + PIECE]


def kind_of(files: Sequence[Path], data: Data) -> str:
    """Return `text`, `prompts`, `chat` or `tokens`; `auto` goes by the suffixes and the first row.

    Prompts are texts with a completion, as TRL joins them.
    """
    if data.format != "auto":
        return "text" if data.format == "files" else data.format
    token_files = [file for file in files if file.suffix.lower() in TOKEN_SUFFIXES]
    if token_files and len(token_files) < len(files):
        must, todo = "must not mix token maps with other files", "Name one kind, or set `data.format`."
        raise ConfigError("data.train", must, got=str(token_files[0]), do=todo)
    if len(token_files) == len(files):
        return "tokens"
    for file in files:
        if (holds := formats.format_of(file)) == formats.TEXT:
            continue
        with contextlib.closing(read_rows(file, holds)) as found:
            number, row = next(found, (0, None))
        if row is None:
            continue
        is_named_text = data.field and (data.field in row or len(data.sets()) == 1)
        pair = chat.pair_columns(row)
        if is_named_text or (pair is None and row.keys().isdisjoint((data.messages, *chat.TURNS))):
            return "text"
        turns = chat.turns_column(row, data.messages)
        is_text = pair == CONTINUED and all(isinstance(row[column], str) for column in CONTINUED)
        if is_text and turns is None and "text" not in row and data.messages == chat.MESSAGES:
            return "prompts"
        if "text" not in row or turns is not None:
            return "chat"
        if pair is not None:
            must, got = "must be a text or a conversation", f"`text` beside `{pair[0]}` and `{pair[1]}`"
            todo = "Set `data.format: text`, or `data.format: chat`."
            raise ConfigError(f"{file}:{number}", must, got=got, do=todo)
        return "text"
    return "text"


def read_documents(files: Sequence[Path], data: Data, counts: DataCounts) -> Iterator[Document]:
    """Yield the documents of files in order, and count their forms and what is left out."""
    kind = counts.kind
    if kind == "chat" and data.field and len(data.sets()) == 1:
        must, todo = "must not be given where rows are conversations", "Name their column in `data.messages`."
        raise ConfigError("data.field", must, got=repr(data.field), do=todo)
    columns: tuple[str, ...] = ()
    for file in files:
        holds = formats.TEXT if data.format == "files" else formats.format_of(file)
        if holds == formats.TEXT:
            if kind == "chat":
                must = "must be rows of conversations: JSON, JSON lines, CSV, parquet or Arrow"
                raise ConfigError(str(file), must, got="a text")
            yield from _counted(Document(file=file), "a text per file", counts)
            continue
        for number, row in read_rows(file, holds):
            where = f"{file}:{number}"
            if kind != "chat":
                columns = columns or _text_columns(row, data.field, where)
                yield from _text(row, columns, where, counts)
                continue
            talk = chat.read_conversation(row, data.messages, where)
            _check_others(row, talk.columns, where, counts)
            if talk.silent:
                counts.noted[SILENT] += 1
            if data.loss_on == "answers" and not talk.answers:
                counts.left[NO_ANSWER] += 1
            else:
                yield from _counted(Document(talk=talk), talk.form, counts)


def _counted(document: Document, form: str, counts: DataCounts) -> Iterator[Document]:
    """Yield a document unless it is blank."""
    counts.forms[form] += 1
    if document.talk is None and not any(piece.strip() for piece in document.pieces()):
        counts.left[EMPTY] += 1
    else:
        yield document


def _text_columns(row: Row, field: str, where: str) -> tuple[str, ...]:
    """Return the columns of the text: one that is named or usual, or a prompt and its completion."""
    if field or "text" in row:
        return (field or "text",)
    if row.keys() >= set(CONTINUED):
        return CONTINUED
    texts = [key for key, value in row.items() if isinstance(value, str)]
    known = texts if len(texts) == 1 else [key for key in TEXT_COLUMNS if key in texts]
    if len(known) != 1 or known[0] in chat.ASKED:
        must = "must have a text in `text`, or in one column"
        todo = _BY_TRL if row.keys() >= {"chosen", "rejected"} else _NAME_IT
        raise ConfigError(where, must, got=names(row) or "nothing", do=todo)
    return (known[0],)


def _text(row: Row, columns: tuple[str, ...], where: str, counts: DataCounts) -> Iterator[Document]:
    for column in columns:
        if not isinstance(row.get(column), str):
            got = formats.type_name(row[column]) if column in row else names(row) or "nothing"
            raise ConfigError(where, f"must have a text in `{column}`", got=got, do=_NAME_IT)
    _check_others(row, columns, where, counts)
    parts = [chat.text_of(row, column, where) for column in columns]
    given = len(parts[0]) if len(parts) > 1 else 0
    joined = "`prompt` continued by `completion`, without a chat template (`data.format: chat` uses it)"
    form = joined if len(parts) > 1 else f"`{columns[-1]}` of rows"
    yield from _counted(Document("".join(parts), given=given), form, counts)


def _check_others(row: Row, read: Collection[str], where: str, counts: DataCounts) -> None:
    """Note the columns that are not read, and refuse preference data of KTO: completions with a label."""
    label = row.get("label")
    if "completion" in read and (isinstance(label, bool) or str(label).lower() in ("true", "false")):
        must = "must be texts or conversations"
        got = "preferences: `completion` with a `label` of true or false"
        raise ConfigError(where, must, got=got, do=_BY_TRL)
    others = [key for key in row if key not in read and key not in counts.unread]
    counts.unread += [key for key in others if chat.has_content(row[key])]


class DocumentWatch:
    """Counts warnings while documents become blocks."""

    def __init__(self, tokenizer: Tokenizer, noted: dict[str, int], seed: int) -> None:
        self._noted, self._marks, self._seed = noted, tokenizer.marks, seed
        self._numbers = np.array(sorted(self._marks.values()), np.int64)
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)))
        self._has_template = tokenizer.has_template
        self._digests = array("Q")

    def is_held_out(self, document: Document, share: float) -> bool:
        """Return True for a `share` of all documents, by their content; record the digests of the others."""
        number = document.number(self._seed)
        is_held = number / 2**64 < share
        if not is_held:
            self._digests.append(number)
        return is_held

    def watched(
        self, document: Document, pieces: Iterable[tuple[Tokens, Tokens]]
    ) -> Iterator[tuple[Tokens, Tokens]]:
        mark = ""
        if document.talk is not None:
            if not self._has_template:
                self._noted[UNTEMPLATED] += 1
            contents = (turn["content"] or "" for turn in document.talk.messages) if self._marks else ()
            mark = next((match[0] for text in contents if (match := self._spelled.search(text))), "")
        for tokens, learned in pieces:
            # One token alone is the start or the end, which is not in the text.
            if document.talk is None and not mark and len(tokens) > 1:
                there = np.intersect1d(tokens, self._numbers)
                mark = next((name for name, number in self._marks.items() if number in there), "")
            yield tokens, learned
        if mark:
            self._noted[SPELLED.format(mark)] += 1

    def close(self, folder: Path) -> None:
        """Write the digests of training documents, and count the documents that are there twice."""
        (folder / DIGESTS).write_bytes(self._digests.tobytes())
        if twice := len(self._digests) - len(np.unique(self._digests)):
            self._noted[TWICE] = twice


def shared_documents(held: tuple[Path, int], trained: Sequence[tuple[Path, int]]) -> int:
    """Count the held-out documents that are trained on too; each folder with its number of documents."""
    (digests, *others) = (_digests(folder, count) for folder, count in (held, *trained))
    found = np.zeros(len(digests), dtype=bool)
    for other in others:
        for first in range(0, len(other), _AT_ONCE):
            found |= np.isin(digests, other[first : first + _AT_ONCE])
    return int(found.sum())


def _digests(folder: Path, count: int) -> np.ndarray:
    try:
        digests = np.memmap(folder / DIGESTS, np.uint64, "r")
    except (OSError, ValueError) as error:
        raise damaged(folder, first_line(error)) from None
    if len(digests) != count:
        raise damaged(folder, f"numbers of {len(digests):,} documents for {count:,}")
    return digests
