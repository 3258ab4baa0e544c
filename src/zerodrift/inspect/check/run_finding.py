"""One finding about a run, and what all rules of findings share: widths of dtypes, and advice by library."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zerodrift.inspect.trace import Column, ModelRecord

Kind = Literal[
    "no-master", "norm-in-16-bits", "upcast-without-effect", "state-too-narrow",
    "rounded-before-accumulation", "router-in-16-bits", "buffer-rounded", "never-updated", "not-averaged",
    "not-accumulated", "norm-of-scaled-gradients", "untied", "ranks-differ", "narrow-export",
    "loss-in-16-bits", "logits-rounded", "average-in-16-bits", "states-rounded", "weights-rounded",
    "wire-in-16-bits", "wire-compressed", "key-without-effect", "not-as-expected",
]  # fmt: skip

BITS = {"bfloat16": 8, "float16": 11}  # dtypes of 16 bits, and the bits of their significand


@dataclass(frozen=True, slots=True)
class RunFinding:
    """One fault, of every parameter that has it."""

    kind: Kind
    column: Column | None
    names: tuple[str, ...]  # names of parameters, or of buffers; empty for a fault of the whole run
    what: str  # the fault, and what it costs
    do: str  # how to mend it with the library that runs
    line: str = ""
    cost: float = 1.0
    """Share of an update, or of a value, that is lost in this run: measured on a sample, or estimated."""


def library(model: ModelRecord) -> str:
    if "DeepSpeedEngine" in model.wrappers:
        return "deepspeed"
    if any(parameter.layout.startswith("sharded") for parameter in model.parameters):
        return "fully_shard"
    return "fsdp" if "FullyShardedDataParallel" in model.wrappers else ""


def advice(texts: dict[str, str], model: ModelRecord) -> str:
    return texts.get(library(model), texts[""])


def finding(
    kind: Kind,
    column: Column | None,
    names: Iterable[str],
    what: str,
    do: str,
    line: str = "",
    cost: float = 1.0,
) -> list[RunFinding]:
    """Return a finding, unless no parameter has the fault."""
    names = tuple(names)
    return [RunFinding(kind, column, names, what, do, line, cost)] if names else []
