"""Report what was read: how much, from which files, what was left out and why, and what deserves a look.

The counts are made while documents become blocks, and are kept beside the blocks. Whatever is read is in
blocks, was cut, or was left out, and is counted once. Warnings change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zerodrift.errors import several


@dataclass
class PartCounts:
    """Counts of one part: training or validation."""

    documents: int = 0
    tokens: int = 0
    """Tokens in blocks, without padding."""
    learned: int = 0
    blocks: int = 0
    padding: int = 0


@dataclass
class DataCounts:
    """Counts of one set of data, made while it is read. The field names are those of the index of blocks."""

    kind: str
    """`text`, `chat` or `tokens`."""
    files: int
    block: int
    train: PartCounts = field(default_factory=PartCounts)
    held: PartCounts = field(default_factory=PartCounts)
    forms: dict[str, int] = field(default_factory=Counter)
    """Source of documents, in words -> how many."""
    left: dict[str, int] = field(default_factory=Counter)
    """Reason why documents were left out -> how many."""
    cut: int = 0
    """Documents longer than a block."""
    cut_tokens: int = 0
    noted: dict[str, int] = field(default_factory=Counter)
    """Warning -> how many documents."""
    empty_blocks: int = 0
    """Blocks left out because nothing in them is learned."""
    unread: list[str] = field(default_factory=list)
    """Columns that are not read, and not empty."""
    beside: Sequence[str] = ()
    """Other files in the folders, in words."""

    @property
    def noun(self) -> str:
        return "conversation" if self.kind == "chat" else "document"

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> DataCounts:
        return DataCounts(**{**values, **{name: PartCounts(**values[name]) for name in ("train", "held")}})

    def reasons(self) -> list[str]:
        """Say what was cut and left out of the files that were read."""
        cut = f"{several(self.cut, self.noun)} cut at the end of a block, by {self.cut_tokens:,} tokens"
        empty = f"{several(self.empty_blocks, 'block')} with nothing to learn"
        left = [f"{several(count, self.noun)} {why}" for why, count in self.left.items()]
        return [*([f"{cut} in all"] if self.cut else []), *left, *([empty] if self.empty_blocks else [])]

    def notes(self) -> list[str]:
        """Return the warnings with their counts."""
        return [f"{several(count, self.noun)} {warning}" for warning, count in self.noted.items()]

    def facts(self) -> list[tuple[str, str]]:
        """Return labelled facts; the first is a summary of all."""
        train, held = self.train, self.held
        tokens = train.tokens + held.tokens
        summary = [several(self.files, "file"), f"{tokens:,} tokens"]
        if self.kind != "tokens":
            documents = train.documents + held.documents + sum(self.left.values())
            summary.insert(1, several(documents, self.noun))
        if self.kind == "chat":
            summary.append(f"{train.learned + held.learned:,} of them learned")
        facts = [("data", ", ".join(summary))]
        is_plain = all(form.startswith(("a text", "`text`")) for form in self.forms)
        if self.forms and (self.kind == "chat" or len(self.forms) > 1 or not is_plain):
            facts.append(("made of", ", ".join(f"{form} ({count:,})" for form, count in self.forms.items())))
        share = train.padding / (train.blocks * self.block) if train.padding else 0.0
        padding = f", {share:.1%} of it padding" if train.padding else ""
        facts.append(("blocks", f"{several(train.blocks, 'block')} of {self.block:,} tokens{padding}"))
        if held.blocks:
            documents_held = several(held.documents, self.noun) if held.documents else "the last blocks"
            of_all = f" ({held.tokens / tokens:.1%})" if tokens else ""
            in_blocks = f"{held.tokens:,} tokens{of_all} in {several(held.blocks, 'block')}"
            facts.append(("held out", f"{documents_held}, {in_blocks}"))
        if reasons := [*self.reasons(), *self.beside]:
            facts.append(("left out", "; ".join(reasons)))
        if notes := self.notes():
            facts.append(("look at", "; ".join(notes)))
        if self.unread:
            more = f" and {len(self.unread) - 6} more" if len(self.unread) > 6 else ""
            facts.append(("not read", f"columns {', '.join(f'`{name}`' for name in self.unread[:6])}{more}"))
        return facts

    def line(self) -> str:
        """Return the facts in one line, without the rarely needed ones."""
        facts = [(label, text) for label, text in self.facts() if label not in ("made of", "not read")]
        plain = ("data", "blocks")
        texts = [text if label in plain else f"{label} {text.replace('; ', ', ')}" for label, text in facts]
        return "; ".join(texts)
