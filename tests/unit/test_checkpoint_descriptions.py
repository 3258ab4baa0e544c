"""Descriptions of ranks' files: a load opens only those that it needs, and never takes that of another
rank, step or run."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint_files import runs, save_as_ranks, seal, value
from tests.unit.refusals import error_of
from zerodrift.api import make_plan
from zerodrift.checkpoint import tensors as lookup
from zerodrift.checkpoint.inspection import inspect
from zerodrift.checkpoint.manifest import (
    Description,
    all_damage,
    read_description,
    read_entries,
    read_manifest,
    sealed,
    verified,
    write_description,
)
from zerodrift.checkpoint.tensors import CheckpointReader, weight_key
from zerodrift.errors import CheckpointError
from zerodrift.plan.table import Plan

CONFIG = {
    "precision": {"mode": "fp32"},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def plan_of(ranks: int) -> Plan:
    layers = nn.Sequential(*(nn.Linear(40, 50) for _ in range(2)), nn.Linear(50, 3, bias=False))
    return make_plan(CONFIG, layers, ranks)


@pytest.fixture(scope="module")
def of_8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_as_ranks(tmp_path_factory.mktemp("many"), plan_of(8))


@pytest.fixture
def tag(of_8: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(of_8, tmp_path / "tag"))


def require_refused(tag: Path, *match: str) -> None:
    """Require one error from a full check, and one from a read without it."""
    told = error_of(CheckpointError, verified, tag)
    assert all(text in told for text in match), told
    assert not inspect(tag, verify=True).complete


def change(tag: Path, rank: int, how: Callable[[Description], Description]) -> None:
    """Rewrite a rank's description."""
    write_description(tag, how(read_description(tag, read_manifest(tag).of_ranks, rank)[0]))


def write_sealed(tag: Path, value: Any) -> None:
    text = json.dumps(value, separators=(",", ":"))
    (tag / "rank-00000.json").write_text(f"{{{sealed('description', text)}}}\n")


def read_all(tag: Path) -> None:
    reader = CheckpointReader(tag)
    for entry in read_entries(tag):
        into = torch.empty(math.prod(entry.shape))
        reader.read_weights([(entry, 0, into)])
        assert torch.equal(into, value(weight_key(entry.name), len(into))), entry.name


def test_a_rank_opens_the_descriptions_of_those_whose_values_it_wants(
    of_8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def read(folder: Path, files: Any, rank: int) -> Any:
        opened.append(rank)
        return read_description(folder, files, rank)

    monkeypatch.setattr(lookup.manifest, "read_description", read)
    entries = {entry.name: entry for entry in read_entries(of_8)}
    wrote = [(name, start, stop, rank) for rank in range(8) for name, start, stop in runs(plan_of(8), rank)]
    for ranks, rank in ((8, 5), (2, 1), (1, 0), (16, 3)):
        opened.clear()
        reader, needed = CheckpointReader(of_8), set[int]()
        for name, start, stop in runs(plan_of(ranks), rank):
            needed |= {r for of, first, last, r in wrote if of == name and first < stop and start < last}
            reader.check(entries[name], start, stop)
            into = torch.empty(stop - start)
            reader.read([(weight_key(name), start, into)])
            assert torch.equal(into, value(weight_key(name), stop)[start:])
        assert sorted(opened) == sorted(needed) and len(needed) <= 8 // ranks + 2, (ranks, rank, opened)


# --- damaged ------------------------------------------------------------------------------------------------


def test_what_is_whole_is_accepted(tag: Path) -> None:
    assert all_damage(tag, verified(tag)) == []
    read_all(tag)
    seal(tag)
    assert all_damage(tag, verified(tag)) == []


def test_no_bit_of_a_description_can_change_unseen(tag: Path) -> None:
    path, files = tag / "rank-00003.json", read_manifest(tag).of_ranks
    good = path.read_bytes()
    for place in range(0, len(good), 9):
        data = bytearray(good)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rank-00003\.json`: must be "):
            read_description(tag, files, 3)
    require_refused(tag, "rank-00003.json")
    with pytest.raises(CheckpointError, match=r"rank-00003\.json`: must be "):
        read_all(tag)


SIX, ZERO = "rank-00006.json", "rank-00000.json"
ANOTHER_SAVE = f"{SIX}`: must be of rank 6 in the save step-00000001@"
LEADS_OUT = "must name files that are in it"


def lengthen(file: Path, by: int = 1) -> None:
    data = file.read_bytes()
    file.write_bytes(data + b" " * by if by > 0 else data[:by])


def mix(tag: Path, step: int) -> None:
    """Replace rank 6's files by those of another save, step or run."""
    other = save_as_ranks(tag.parent / "other", plan_of(8), step)
    for name in ("__6_0.distcp", SIX, "rank-00006.pt"):
        shutil.copy(other / name, tag / name)


def lead_out(tag: Path, name: str) -> None:
    shutil.copy(tag / "__0_0.distcp", tag.parent / "secret")
    change(tag, 0, lambda of: replace(of, tensors=replace(of.tensors, name=name)))


HARMS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "missing": (lambda tag: (tag / SIX).unlink(), f"{SIX}`: must be there; got no such file", SIX),
    "cut": (lambda tag: lengthen(tag / SIX, -9), f"{SIX}`: must be as rank 6 wrote it", SIX),
    "another step": (lambda tag: mix(tag, 2), ANOTHER_SAVE, SIX),
    "another run": (lambda tag: mix(tag, 1), ANOTHER_SAVE, SIX),
    "longer tensors": (lambda tag: lengthen(tag / "__6_0.distcp"), "__6_0.distcp`: must have the ", ""),
    "longer state": (lambda tag: lengthen(tag / "rank-00006.pt"), "rank-00006.pt`: must have the ", ""),
    # Its description is right about itself: the sum in the manifest is not.
    "written anew": (
        lambda tag: change(tag, 4, lambda of: replace(of, chunks=of.chunks[::-1])),
        "must hold the files that 8 ranks wrote; got others",
        "",
    ),
    **{f"file {name!r}": (partial(lead_out, name=name), LEADS_OUT, LEADS_OUT) for name in ("../secret", "")},
    **{
        f"sealed {value}": (partial(write_sealed, value=value), f"{ZERO}`: must be as rank 0 wrote it", ZERO)
        for value in ([], {"files": 3})
    },
}
"""Name -> damage, the error of a full check, and that of a read, if a read finds it."""


@pytest.mark.parametrize("name", HARMS)
def test_a_description_that_is_not_the_ranks_own_is_named(name: str, tag: Path) -> None:
    harm, looking, reading = HARMS[name]
    harm(tag)
    require_refused(tag, looking)
    if reading:
        with pytest.raises(CheckpointError, match=reading):
            read_all(tag)


def first(of: Description, **change: Any) -> Description:
    return replace(of, chunks=(replace(of.chunks[0], **change), *of.chunks[1:]))


LIES: dict[str, Callable[[Description], Description]] = {
    "twice": lambda of: replace(of, chunks=(*of.chunks, of.chunks[0])),
    "none": lambda of: replace(of, chunks=()),
    "of another length": lambda of: first(of, count=of.chunks[0].count - 1),
    "of another tensor": lambda of: first(of, numel=10**12),
    "of another dtype": lambda of: first(of, dtype="float64"),
    "behind the end": lambda of: first(of, offset=10**15),
    "below zero": lambda of: first(of, start=-1),
}


@pytest.mark.parametrize("how", LIES)
def test_a_description_that_lies_is_an_error_and_never_another_value(how: str, tag: Path) -> None:
    with pytest.raises(CheckpointError, match="must"):
        change(tag, 0, LIES[how])
        seal(tag)
        for entry in read_entries(tag):
            CheckpointReader(tag).check(entry)
        read_all(tag)
