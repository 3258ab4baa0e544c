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

A message reads **where: what must hold; got what. What to do.** `Problem` holds those four parts, and
`Problems` collects all of a kind so that a person sees every mistake at once. What a message
quotes is somebody else's, so it is made legible where it is told.

Invariant: users only ever see subclasses of ZerodriftError; a broken promise of our own code raises
AssertionError.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zerodrift.legible import legible, lines


class ZerodriftError(Exception):
    """Base of everything that zerodrift refuses."""

    def __str__(self) -> str:
        return lines(super().__str__())


class ConfigError(ZerodriftError):
    """The config cannot be read or cannot be meant."""


class ModelError(ZerodriftError):
    """The model cannot be described."""


class UnsupportedError(ZerodriftError):
    """The combination is understood, and refused."""


class MeshError(ZerodriftError):
    """Ranks and axes do not fit together."""


class RankError(ZerodriftError):
    """A rank died, hung, or disagrees with the others."""


class NonFiniteError(ZerodriftError):
    """A NaN or an infinity was found, and the caller asked for an error."""


class PrecisionError(ZerodriftError):
    """A run did something else than its plan says."""


class CheckpointError(ZerodriftError):
    """A checkpoint cannot be written, is damaged, or belongs to something else."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in the four parts of a message."""

    where: str
    """The key, file or parameter, in the user's own spelling; shown in backticks."""
    must: str
    """What must hold, as a clause: "must be 0, 1, 2 or 3"."""
    got: str = ""
    """What was found, usually a `repr`."""
    todo: str = ""
    """What to do about it, a sentence of its own."""

    def __str__(self) -> str:
        text = f"`{self.where}`: {self.must}"
        if self.got:
            text += f"; got {self.got}"
        if not text.endswith((".", "?")):
            text += "."
        if self.todo:
            text += f" {self.todo}"
        return legible(text)


MOST = 50
"""Problems that one error tells."""


class Problems:
    """Collects problems and raises them as one error."""

    def __init__(self) -> None:
        self._found: dict[Problem, None] = {}

    def add(self, where: str, must: str, got: str = "", todo: str = "") -> None:
        self._found[Problem(where, must, got, todo)] = None

    def __bool__(self) -> bool:
        return bool(self._found)

    def __iter__(self) -> Iterator[Problem]:
        return iter(self._found)

    def raise_as(self, error: type[ZerodriftError], heading: str = "") -> None:
        """Raise `error` if anything was collected; one problem per line when there are several."""
        if not self._found:
            return
        prefix = f"{legible(heading)}: " if heading else ""
        if len(self._found) == 1:
            raise error(f"{prefix}{next(iter(self._found))}")
        told = [f"{prefix}{len(self._found)} problems"]
        told += [f"  {number}. {problem}" for number, problem in enumerate(self, 1) if number <= MOST]
        if len(self._found) > MOST:
            told.append(f"  and {len(self._found) - MOST:,} more")
        raise error("\n".join(told))


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
    return ZerodriftError(str(Problem(where, "must be usable", error.strerror)))


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known words closest to `word`, best first; empty when nothing is close."""
    return difflib.get_close_matches(word, list(known), n=count, cutoff=0.6)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence that offers the nearest known words, or an empty string."""
    found = nearest(word, known, count=3)
    if not found:
        return ""
    return "Did you mean " + " or ".join(f"`{name}`" for name in found) + "?"
