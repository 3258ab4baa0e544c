"""What was read: how much, from what, and what was left out and why.

It is counted where blocks are made, kept beside them, and told in a few lines, on the page of a run and by
`zerodrift data`.

Invariant: what was read is in blocks, was cut, or was left out, and each is counted once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LONG, NOTHING = "cut at the end of a block", "with nothing to learn"


@dataclass(frozen=True, slots=True)
class PartRead:
    """Of what is trained on, or of what is held out."""

    documents: int = 0
    tokens: int = 0
    """In blocks, without padding."""
    learned: int = 0
    blocks: int = 0
    padding: int = 0
    """Tokens that only fill blocks up."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Of a job's data."""

    kind: str
    """`text`, `chat` or `tokens`."""
    files: int
    block: int
    train: PartRead
    held: PartRead = PartRead()
    forms: Mapping[str, int] = field(default_factory=dict)
    """What documents were made of, with how many."""
    left: Mapping[str, int] = field(default_factory=dict)
    """Documents that were left out, by reason."""
    cut: int = 0
    """Documents that were longer than a block."""
    cut_tokens: int = 0
    """That were behind the end of a block."""
    noted: Mapping[str, int] = field(default_factory=dict)
    """What may not be as it was meant, with how many documents."""
    empty_blocks: int = 0
    """Blocks that were left out because nothing in them is learned."""
    unread: tuple[str, ...] = ()
    """Columns of rows that are not read, and not empty."""
    beside: tuple[str, ...] = ()
    """What lies in folders beside the files that were read."""

    @property
    def noun(self) -> str:
        return "conversation" if self.kind == "chat" else "document"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Reading:
        """What `to_json` made."""
        parts = {name: PartRead(**values[name]) for name in ("train", "held")}
        lists = {name: tuple(values[name]) for name in ("unread", "beside")}
        return Reading(**{**values, **parts, **lists})

    def reasons(self) -> list[str]:
        """What was cut, and what was left out of files that were read."""
        cut = [f"{_several(self.cut, self.noun)} {LONG}, by {self.cut_tokens:,} tokens in all"] * bool(
            self.cut
        )
        left = [f"{_several(count, self.noun)} {why}" for why, count in self.left.items()]
        empty = [f"{_several(self.empty_blocks, 'block')} {NOTHING}"] * bool(self.empty_blocks)
        return [*cut, *left, *empty]

    def notes(self) -> list[str]:
        """What somebody should look at."""
        return [f"{_several(count, self.noun)} {what}" for what, count in self.noted.items()]

    def with_last_blocks_held(self, held: PartRead) -> Reading:
        """Where blocks are held out, and not documents."""
        kept = replace(
            self.train,
            tokens=self.train.tokens - held.tokens,
            learned=self.train.learned - held.learned,
            blocks=self.train.blocks - held.blocks,
            padding=self.train.padding - held.padding,
        )
        return replace(self, train=kept, held=held)


def lines(reading: Reading) -> list[tuple[str, str]]:
    """What was read, as facts with their names; the first is all of it in one line."""
    told = [("data", _whole(reading))]
    if reading.forms and (reading.kind == "chat" or len(reading.forms) > 1 or _named(reading)):
        told.append(("made of", ", ".join(f"{form} ({count:,})" for form, count in reading.forms.items())))
    told.append(("blocks", _blocks(reading)))
    if reading.held.blocks:
        told.append(("held out", _held(reading)))
    if reasons := [*reading.reasons(), *reading.beside]:
        told.append(("left out", "; ".join(reasons)))
    if notes := reading.notes():
        told.append(("look at", "; ".join(notes)))
    if reading.unread:
        told.append(("not read", "columns " + _few([f"`{name}`" for name in reading.unread])))
    return told


def line(reading: Reading) -> str:
    """The same in one line, without what nobody misses."""
    facts = [_whole(reading), f"{_blocks(reading)}"]
    if reading.held.blocks:
        facts.append(f"held out {_held(reading)}")
    if reasons := [*reading.reasons(), *reading.beside]:
        facts.append(f"left out {', '.join(reasons)}")
    if notes := reading.notes():
        facts.append(f"look at {', '.join(notes)}")
    return "; ".join(facts)


def _named(reading: Reading) -> bool:
    return any(not form.startswith(("a text", "`text`")) for form in reading.forms)


def _whole(reading: Reading) -> str:
    documents = reading.train.documents + reading.held.documents + sum(reading.left.values())
    tokens = reading.train.tokens + reading.held.tokens
    parts = [_several(reading.files, "file")]
    if reading.kind != "tokens":
        parts.append(_several(documents, reading.noun))
    parts.append(f"{tokens:,} tokens")
    learned = reading.train.learned + reading.held.learned
    if reading.kind == "chat":
        parts.append(f"{learned:,} of them learned")
    return ", ".join(parts)


def _blocks(reading: Reading) -> str:
    train = reading.train
    full = train.blocks * reading.block
    padding = f", {train.padding / full:.1%} of it padding" if train.padding else ""
    return f"{_several(train.blocks, 'block')} of {reading.block:,} tokens{padding}"


def _held(reading: Reading) -> str:
    held, all_tokens = reading.held, reading.train.tokens + reading.held.tokens
    documents = f"{_several(held.documents, reading.noun)}, " if held.documents else "the last blocks, "
    share = f" ({held.tokens / all_tokens:.1%})" if all_tokens else ""
    return f"{documents}{held.tokens:,} tokens{share} in {_several(held.blocks, 'block')}"


def _several(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' if count != 1 else ''}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
