"""The exception tree, and how a message is formed.

    ZerodriftError              anything that zerodrift says no to
    +-- ConfigError             a config file or dict: unreadable, unknown keys, contradictions
    +-- ModelError              a model that cannot be described: no such file, cannot be built
    +-- UnsupportedError        a combination that is understood and refused, with the reason
    +-- MeshError               ranks and axes that do not fit together
    +-- RankError               a rank that died, hung or disagrees with the others
    +-- NonFiniteError          a NaN or infinity where the caller asked for an error
    +-- PrecisionError          a dtype that was seen in a run and is not the plan's
    +-- CheckpointError         a checkpoint that cannot be written, is damaged, or belongs to something else

A message reads **where: what must hold; got what. What to do.** An error is made of those four parts,
`raise ConfigError(where, must, got=..., do=...)`, and keeps them. `Problems` collects all of a kind so that a
person sees every mistake at once, and `relayed` is for what another rank or process has said, which is text.
What a message quotes is somebody else's, so it is made legible where it is told.

Invariant: users only ever see subclasses of ZerodriftError; a broken promise of our own code raises
AssertionError.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerodrift.legible import legible, lines

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in the four parts of a message."""

    where: str
    """The key, argument, file or parameter, in the user's own spelling; shown in backticks, unless it has its
    own."""
    must: str
    """What must hold, as a clause: "must be 0, 1, 2 or 3"."""
    _: KW_ONLY
    got: str = ""
    """What was found, usually a `repr`."""
    do: str = ""
    """What to do about it, in sentences of their own."""

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


MOST = 50
"""Problems that one error tells."""


class ZerodriftError(Exception):
    """Base of everything that zerodrift refuses.

    `where`, `must`, `got` and `do` are the parts of the message, of several problems those of the first;
    `problems` has them all.
    """

    problems: tuple[Problem, ...]

    def __init__(self, where: str | Path, must: str, *, got: object = "", do: str = "") -> None:
        problem = Problem(str(where), must, got=str(got), do=do)
        self._set(str(problem), (problem,))

    @classmethod
    def of(cls, problems: Iterable[Problem], heading: str = "") -> Self:
        """One error of several problems, one a line, behind the file that all of them are in."""
        found = tuple(problems)
        prefix = f"{legible(heading)}: " if heading else ""
        if len(found) == 1:
            return cls._made(f"{prefix}{found[0]}", found)
        lines = [f"{prefix}{len(found)} problems"]
        lines += [f"  {number}. {problem}" for number, problem in enumerate(found[:MOST], 1)]
        if len(found) > MOST:
            lines.append(f"  and {len(found) - MOST:,} more")
        return cls._made("\n".join(lines), found)

    @classmethod
    def joined(cls, errors: Iterable[ZerodriftError]) -> Self:
        """What several errors say, one after the other."""
        found = list(errors)
        return cls._made(
            "\n".join(map(str, found)), tuple(each for error in found for each in error.problems)
        )

    @classmethod
    def relayed(cls, text: str) -> Self:
        """What another rank or process said, which has come here as text and has no parts any more."""
        return cls._made(text, ())

    def reworded(self, change: Callable[[str], str]) -> Self:
        """The same with other advice: `change` is given what to do, and the text that it is in."""
        problems = tuple(replace(problem, do=change(problem.do)) for problem in self.problems)
        return self._made(change(self.args[0]), problems)

    @property
    def where(self) -> str:
        return self.problems[0].where if self.problems else ""

    @property
    def must(self) -> str:
        return self.problems[0].must if self.problems else ""

    @property
    def got(self) -> str:
        return self.problems[0].got if self.problems else ""

    @property
    def do(self) -> str:
        return self.problems[0].do if self.problems else ""

    @classmethod
    def _made(cls, text: str, problems: tuple[Problem, ...]) -> Self:
        error = cls.__new__(cls)
        error._set(text, problems)
        return error

    def _set(self, text: str, problems: tuple[Problem, ...]) -> None:
        self.args = (lines(text),)
        self.problems = problems

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self)._made, (self.args[0], self.problems), self.__dict__


class ConfigError(ZerodriftError):
    """The config cannot be read, or contradicts itself."""


class ModelError(ZerodriftError):
    """The model cannot be described: no such file, or it cannot be built."""


class UnsupportedError(ZerodriftError):
    """The combination is understood and refused, with the reason."""


class MeshError(ZerodriftError):
    """The number of ranks does not fit the axes of the mesh."""


class RankError(ZerodriftError):
    """A rank died, hung, or disagrees with the others."""


class NonFiniteError(ZerodriftError):
    """A NaN or an infinity was found, and the caller asked for an error."""


class PrecisionError(ZerodriftError):
    """A run used a dtype that is not the plan's."""


class CheckpointError(ZerodriftError):
    """A checkpoint cannot be written, is damaged, or belongs to something else."""


class Problems:
    """Collects problems and raises them as one error."""

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
    """What somebody else's error says, without its stack; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def said(error: BaseException) -> str:
    """The same behind its class, for an error whose text alone could be anything."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"


def refused_by_system(error: OSError) -> ZerodriftError | None:
    """A file that cannot be used, in our words; None for an error that is of no file."""
    if error.filename is None or not error.strerror:
        return None
    place = error.filename if error.filename2 is None else error.filename2  # of a rename, what it was to be
    where = os.fsdecode(place) if isinstance(place, (str, bytes)) else str(place)
    return ZerodriftError(where, "must be usable", got=error.strerror)


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known words closest to `word`, best first; empty when nothing is close."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.6)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known words, or an empty string."""
    near = nearest(word, known, count=3)
    if not near:
        return ""
    return "Did you mean " + " or ".join(f"`{name}`" for name in near) + "?"


def several(count: int, word: str, plural: str = "") -> str:
    """`1 rank`, `64 ranks`."""
    return f"1 {word}" if count == 1 else f"{count:,} {plural or word + 's'}"


def listed(words: Iterable[object], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = list(map(str, words))
    return f" {last} ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
