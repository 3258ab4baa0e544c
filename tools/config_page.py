"""Render the tables of keys: docs/config.md from the schema, docs/deepspeed.md from DeepSpeed's table.

Invariant: the texts come from docstrings and the table. No key is described here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from zerodrift.config import deepspeed, fields
from zerodrift.config.schema import ColumnKeys, Config
from zerodrift.config.tree import off_values

OURS = ("precision", "sharding", "pipeline", "experts", "backend")
"""Top-level keys that DeepSpeed does not have."""

_SAME_AS = {"precision.rules[].reduce": "precision.reduce"}
"""Blocks with the keys of another block, which are printed once."""

_COLUMNS = "Columns"
_WITH_COLUMNS = ("precision", "precision.rules[]")
"""Blocks with a key for every column. The columns have a table of their own."""

_THEIR_KEYS = (
    "Spelled as in DeepSpeed. [deepspeed.md](deepspeed.md) lists all of its keys, with those that are "
    "ignored or refused."
)

_COLUMNS_INTRO = """\
These are the places where a parameter, its gradient and its optimizer state have a dtype. As keys of
`precision` they apply to every parameter, and as keys of a rule to those that it matches. `grad` to `state`
exist only for trained parameters. The stage decides which columns are sharded: see
[architecture.md](architecture.md#2-the-columns)."""


def render_page() -> str:
    """Render the tables of `docs/deepspeed.md`."""
    parts = []
    for title, entries in deepspeed.SECTIONS.items():
        rows = [_row(entry) for entry in entries]
        parts += [f"## {title}", _table(("Key", "What happens", "What it decides, or the reason"), rows)]
    return "\n\n".join(parts) + "\n"


def render_config() -> str:
    """Render the tables of `docs/config.md`."""
    ours = [(name, keys) for name, keys in _blocks() if _root(name, keys) in OURS]
    theirs = [(name, keys) for name, keys in _blocks() if _root(name, keys) not in OURS]
    parts = ["## zerodrift's keys", *_sections(ours), "## DeepSpeed's keys", _THEIR_KEYS, *_sections(theirs)]
    return "\n\n".join(parts) + "\n"


def _blocks() -> Iterator[tuple[str, list[fields.Key]]]:
    """Yield blocks of keys by name. The keys at top level come last, ours before DeepSpeed's."""
    columns: list[fields.Key] = []
    blocks: dict[str, list[fields.Key]] = {_COLUMNS: columns, "backend": [], "": []}
    for key in fields.every_key(Config):
        parent, _, name = key.path.rpartition(".")
        if parent in _WITH_COLUMNS and name in ColumnKeys.model_fields:
            columns += [key] if parent == _WITH_COLUMNS[0] else []
        elif parent not in _SAME_AS and (parent or fields.block_of(key.kind) is None):
            blocks.setdefault("backend" if name == "backend" else parent, []).append(key)
    top = {name: blocks.pop(name) for name in ("backend", "")}
    yield from blocks.items()
    yield from top.items()


def _root(name: str, keys: Sequence[fields.Key]) -> str:
    return (keys[0].path if name in ("", _COLUMNS) else name).partition(".")[0]


def _sections(blocks: Iterable[tuple[str, list[fields.Key]]]) -> Iterator[str]:
    for name, keys in blocks:
        if name == _COLUMNS:
            yield from (f"### {_COLUMNS}", _COLUMNS_INTRO)
        else:
            yield f"### `{name}`" if name and name != "backend" else "### At top level"
        if name in _WITH_COLUMNS:
            yield "Every [column](#columns) is a key of this block too."
        yield _table(
            ("Key", "Allowed", "What it is"),
            [(f"`{key.path.rpartition('.')[2]}`", fields.admits(key.kind), key.doc) for key in keys],
        )


def _row(entry: deepspeed.Entry) -> tuple[str, str, str]:
    fate, text = str(entry.fate), entry.text
    if fate == "alias":
        fate, text = f"read as `{entry.text}`", f"another spelling of `{entry.text}`"
    elif fate == "refused" and (off := off_values(entry)):
        fate = f"refused, unless {off}"
    return f"`{entry.key}`", fate, f"{text}. {entry.instead}" if entry.instead else text


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
