"""One thing that a run that was watched does at the cost of precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zerodrift.observer.seen import Column, SeenParameter

Kind = Literal[
    "no-master",
    "norm-in-16-bits",
    "upcast-without-effect",
    "state-too-narrow",
    "rounded-before-accumulation",
    "router-in-16-bits",
    "buffer-rounded",
    "never-updated",
    "not-averaged",
    "not-accumulated",
    "norm-of-scaled-gradients",
    "untied",
    "ranks-differ",
    "narrow-export",
    "key-without-effect",
    "not-as-expected",
]


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One thing, of every parameter that it is true of."""

    kind: Kind
    column: Column | None
    names: tuple[str, ...]
    """Of parameters, or of buffers; empty where it is of the run."""
    what: str
    """What was seen, and what it costs."""
    do: str
    """How to mend it with the library that runs."""
    line: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "kind": self.kind,
            "column": self.column,
            "names": list(self.names),
            "what": self.what,
            "do": self.do,
            "line": self.line,
        }


def names_of(parameters: Iterable[SeenParameter]) -> tuple[str, ...]:
    return tuple(parameter.name for parameter in parameters)
