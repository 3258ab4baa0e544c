"""Exception classes, and the format of their messages.

A message reads **where: what must hold; got what. What to do.** An error keeps these four parts:
`raise ConfigError(where, must, got=..., do=...)`. `Problems` collects several into one error. `relayed` makes
an error from the text of another rank or process. Quoted text is made legible.

Each problem has a kind, which docs/errors.md explains under a heading of that name. It is the kind of the
class, unless the requirement is one of `KINDS`.

Invariant: users only see subclasses of ZerodriftError. A bug of our own raises AssertionError.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from zerodrift.legible import legible, lines

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake, in the four parts of a message."""

    where: str
    """Key, argument, file or parameter in the user's spelling. Backticks are added if it has none."""
    must: str
    """Requirement as a clause: "must be 0, 1, 2 or 3"."""
    _: KW_ONLY
    got: str = ""
    """Value that was found, usually a `repr`."""
    do: str = ""
    """Advice in whole sentences."""

    def __str__(self) -> str:
        where = self.where if "`" in self.where else f"`{self.where}`"
        text = f"{where}: {self.must}"
        if self.got:
            text += f"; got {self.got}"
        if not text.endswith((".", "?")):
            text += "."
        if self.do:
            text += f" {self.do}"
        return legible(text)


KINDS = (
    ("unknown-key", r"must be a key of|must be known$"),
    ("no-match", r"must match"),
    (
        "not-gathered",
        r"must be (gathered|loaded inside|copied or saved inside|written inside)|must have a gradient",
    ),
    ("parameter-changed", r"must stay (?!as it is|locked|open)"),
    ("ranks-disagree", r"on every rank|on all ranks|the same bits|in the same order|alike on"),
    (
        "not-the-same-model",
        r"as when it was saved|must hold (every|no) parameter|must have shape|the parameters that",
    ),
    ("no-values", r"must hold values|must have values|must be readable from the files"),
    ("file", r"must be (usable|readable|a file|there(?! when))|that can be (read|written)|must exist"),
)
"""Kind -> how a requirement of that kind is written."""

MOST = 50
"""Most problems in the text of one error."""
MOST_BESIDE = 10_000
"""Most names of a folder that are compared with a name that is not there."""


class ZerodriftError(Exception):
    """Base class of all refusals.

    `where`, `must`, `got` and `do` are the parts of the first problem. `problems` has all of them.
    """

    where: str
    must: str
    got: str
    do: str

    kind: ClassVar[str] = "command"
    """Kind of a problem that is none of `KINDS`."""
    problems: tuple[Problem, ...]

    def __init__(self, where: str | Path, must: str, *, got: object = "", do: str = "") -> None:
        problem = Problem(str(where), must, got=str(got), do=do)
        self._set(str(problem), (problem,))

    @classmethod
    def of(cls, problems: Iterable[Problem], heading: str = "") -> Self:
        """Make one error of several problems, one per line, behind the name of their file."""
        found = tuple(problems)
        prefix = f"{legible(heading)}: " if heading else ""
        if len(found) == 1:
            return cls.relayed(f"{prefix}{found[0]}", found)
        lines = [f"{prefix}{len(found)} problems"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(found[:MOST], 1)]
        if len(found) > MOST:
            lines.append(f"  and {len(found) - MOST:,} more")
        return cls.relayed("\n".join(lines), found)

    @classmethod
    def joined(cls, errors: Iterable[ZerodriftError]) -> Self:
        """Join the texts and problems of several errors."""
        found = list(errors)
        return cls.relayed(
            "\n".join(map(str, found)), tuple(each for error in found for each in error.problems)
        )

    @property
    def kinds(self) -> list[str]:
        """The kinds of all problems, without repetition. `zerodrift help KIND` explains each."""
        found = (
            next((kind for kind, pattern in KINDS if re.search(pattern, problem.must)), self.kind)
            for problem in self.problems
        )
        return list(dict.fromkeys(found)) or [self.kind]

    def see(self) -> str:
        """Return the line that says where this error is explained."""
        return f"To read about it: {listed(f'zerodrift help {kind}' for kind in self.kinds[:3])}"

    @classmethod
    def relayed(cls, text: str, problems: Iterable[Problem] = ()) -> Self:
        """Make an error from a text, as another rank or process had it, with its problems if they are
        known."""
        error = cls.__new__(cls)
        error._set(text, tuple(problems))
        return error

    def _set(self, text: str, problems: tuple[Problem, ...]) -> None:
        self.args = (lines(text),)
        self.problems = problems
        first = problems[0] if problems else Problem("", "")
        self.where, self.must, self.got, self.do = first.where, first.must, first.got, first.do
        self.__notes__ = [self.see()]  # Python 3.11 and later print it below the message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).relayed, (self.args[0], self.problems), self.__dict__


class ConfigError(ZerodriftError):
    """Config that cannot be read or contradicts itself."""

    kind = "config"


class ModelError(ZerodriftError):
    """Model that cannot be read, built or described."""

    kind = "model"


class UnsupportedError(ZerodriftError):
    """Combination that is refused with its reason."""

    kind = "unsupported"


class MeshError(ZerodriftError):
    """Number of ranks that does not fit the axes of the mesh."""

    kind = "mesh"


class RankError(ZerodriftError):
    """Rank that died, hung, or disagrees with the others."""

    kind = "ranks"


class NonFiniteError(ZerodriftError):
    """NaN or infinity, where the caller asked for an error."""

    kind = "non-finite"


class PrecisionError(ZerodriftError):
    """Dtype in a run that differs from the plan."""

    kind = "precision"


class CheckpointError(ZerodriftError):
    """Checkpoint that cannot be written, is damaged, or belongs to another run or model."""

    kind = "checkpoint"


class Problems:
    """Collection of problems, raised as one error."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    def add(self, where: str | Path, must: str, *, got: object = "", do: str = "") -> None:
        self._found[Problem(str(where), must, got=str(got), do=do)] = None

    def include(self, *problems: Problem) -> None:
        self._found.update(dict.fromkeys(problems))

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def raise_as(self, error: type[ZerodriftError], heading: str = "") -> None:
        """Raise `error` if anything was collected."""
        if self._found:
            raise error.of(self, heading)


def first_line(error: BaseException) -> str:
    """Return the first line of a foreign error, or its class if it has no text."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def said(error: BaseException) -> str:
    """Return the class and the first line of a foreign error."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


def kind_of(value: object) -> str:
    """Name what a value is, for a message: `the class Linear`, `int`."""
    return f"the class {value.__qualname__}" if isinstance(value, type) else type(value).__qualname__


def refused_by_system(error: OSError) -> ZerodriftError | None:
    """Turn an OSError of a file into a refusal. Return None for an error without a file."""
    if error.filename is None or not error.strerror:
        return None
    place = error.filename if error.filename2 is None else error.filename2  # the target of a rename
    where = os.fsdecode(place) if isinstance(place, (str, bytes)) else str(place)
    if isinstance(error, FileNotFoundError):
        return ZerodriftError(where, "must exist", got="no such file or folder", do=nearest_path(where))
    return ZerodriftError(where, "must be usable", got=error.strerror)


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """Return the known words closest to `word`, best first, or an empty list."""
    return difflib.get_close_matches(str(word), list(known), n=count, cutoff=0.6)


def did_you_mean(word: str, known: Iterable[str], count: int = 3) -> str:
    """Return a sentence that offers the nearest known words, or `""`."""
    near = " or ".join(f"`{name}`" for name in nearest(word, known, count))
    return f"Did you mean {near}?" if near else ""


def nearest_path(written: str | os.PathLike[str]) -> str:
    """Return a sentence that offers the nearest name beside a path that is not there, or `""`."""
    path = Path(written)
    try:
        place = path.expanduser()
        names = [] if place.exists() else [near.name for near in islice(place.parent.iterdir(), MOST_BESIDE)]
    except (OSError, RuntimeError, ValueError):  # a name too long, a home that is not there
        return ""
    return "".join(f"Did you mean `{path.parent / near}`?" for near in nearest(path.name, names))


def several(count: int, word: str, plural: str = "") -> str:
    """Format a count: `1 rank`, `64 ranks`."""
    return f"1 {word}" if count == 1 else f"{count:,} {plural or word + 's'}"


def first_of(words: Sequence[str], most: int) -> str:
    """Join the first words, and count the others: `a, b and 3 more`."""
    more = len(words) - most
    return ", ".join(words[:most]) + (f" and {more:,} more" if more > 0 else "")


def listed(words: Iterable[object], last: str = "and") -> str:
    """Join words: `a`, `a and b`, `a, b and c`."""
    texts = list(map(str, words))
    return f" {last} ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
