"""What ranks wrote is described beside it: flat in their number, opened where it is needed, and never that of
another rank, step or run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerodrift as zd
from tests.described import found_elsewhere, runs, save_as_ranks, seal, value
from zerodrift.api import make_plan
from zerodrift.checkpoint import tensors as lookup
from zerodrift.checkpoint.inspect import inspect
from zerodrift.checkpoint.manifest import (
    NO_SUMS,
    Description,
    all_damage,
    rank_files,
    read_description,
    read_entries,
    read_manifest,
    sealed,
    verified,
    write_description,
    write_plan,
)
from zerodrift.checkpoint.tensors import CheckpointReader, Destination, weight_key
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
    """By whoever looks at all of it, in one error; and by whoever reads it without having looked."""
    with pytest.raises(CheckpointError) as caught:
        verified(tag)
    assert all(text in str(caught.value) for text in match), str(caught.value)
    found = inspect(tag, verify=True)
    assert not found.complete


def read_all(tag: Path) -> None:
    reader = CheckpointReader(tag)
    for entry in read_entries(tag):
        whole = value(weight_key(entry.name), reader.weight(entry).numel())
        assert torch.equal(reader.weight(entry).flatten(), whole), entry.name


# --- flat ---------------------------------------------------------------------------------------------------


def size_of(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir() if file.suffix in (".json", ".metadata"))


def test_what_a_save_writes_for_all_ranks_does_not_grow_with_them(tmp_path: Path) -> None:
    """But for the digits of their number."""
    sizes = {}
    for ranks in (2, 8, 64):
        tag = save_as_ranks(tmp_path / str(ranks), plan_of(ranks))
        own = [(tag / f"rank-{rank:05d}.json").stat().st_size for rank in range(ranks)]
        sizes[ranks] = size_of(tag) - sum(own), max(own)
    assert abs(sizes[64][0] - sizes[2][0]) <= 40, sizes
    assert sizes[64][1] <= sizes[8][1] <= sizes[2][1], sizes


def test_a_rank_opens_the_descriptions_of_those_whose_values_it_wants(
    of_8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def read(folder: Path, files: Any, rank: int) -> Any:
        opened.append(rank)
        return read_description(folder, files, rank)

    monkeypatch.setattr(lookup, "read_description", read)
    entries = {entry.name: entry for entry in read_entries(of_8)}
    wrote = [(name, start, stop, rank) for rank in range(8) for name, start, stop in runs(plan_of(8), rank)]
    for ranks, rank in ((8, 5), (4, 1), (2, 1), (1, 0), (16, 3)):
        opened.clear()
        reader, needed = CheckpointReader(of_8), set[int]()
        for name, start, stop in runs(plan_of(ranks), rank):
            needed |= {r for of, first, last, r in wrote if of == name and first < stop and start < last}
            reader.check(entries[name], start, stop)
            into = torch.empty(stop - start)
            reader.read([Destination(weight_key(name), start, into)])
            assert torch.equal(into, value(weight_key(name), stop)[start:])
        assert sorted(opened) == sorted(needed) and len(needed) <= 8 // ranks + 2, (ranks, rank, opened)


def test_the_rule_is_where_ranks_wrote(of_8: Path) -> None:
    assert found_elsewhere(of_8) == []


def test_what_no_plan_says_is_found_all_the_same(tag: Path) -> None:
    document = json.loads((tag / "plan.json").read_text())
    for other in ({**document, "rows": 3}, make_plan(CONFIG, nn.Linear(2, 2), 4).to_json()):
        write_plan(tag, other)
        seal(tag)
        read_all(tag)
    (tag / "plan.json").unlink()
    read_all(tag)


# --- damaged ------------------------------------------------------------------------------------------------


def test_what_is_whole_is_accepted(tag: Path) -> None:
    assert all_damage(tag, verified(tag)) == []
    read_all(tag)
    seal(tag)
    assert all_damage(tag, verified(tag)) == []


def test_no_bit_of_a_description_can_change_unseen(tag: Path) -> None:
    path, files = tag / "rank-00003.json", read_manifest(tag).of_ranks
    good = path.read_bytes()
    for place in range(0, len(good), 3):
        data = bytearray(good)
        data[place] ^= 1 << (place % 8)
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"rank-00003\.json`: must be "):
            read_description(tag, files, 3)
    require_refused(tag, "rank-00003.json")
    with pytest.raises(CheckpointError, match=r"rank-00003\.json`: must be "):
        read_all(tag)


def missing(tag: Path) -> str:
    (tag / "rank-00006.json").unlink()
    return "rank-00006.json`: must be there; got no such file"


def cut(tag: Path) -> str:
    path = tag / "rank-00006.json"
    path.write_bytes(path.read_bytes()[:-9])
    return "rank-00006.json`: must be what rank 6 wrote"


def swapped(tag: Path) -> str:
    first, second = (tag / f"rank-0000{rank}.json" for rank in (2, 6))
    texts = first.read_bytes(), second.read_bytes()
    first.write_bytes(texts[1])
    second.write_bytes(texts[0])
    return "rank-00006.json`: must be of rank 6"


def of_another_step(tag: Path) -> str:
    other = save_as_ranks(tag.parent / "other", plan_of(8), 2)
    for name in ("__6_0.distcp", "rank-00006.json", "rank-00006.pt"):
        shutil.copy(other / name, tag / name)
    return "rank-00006.json`: must be of rank 6 in the save step-00000001@"


def of_the_same_step_in_another_run(tag: Path) -> str:
    other = save_as_ranks(tag.parent / "other", plan_of(8))
    shutil.copy(other / "rank-00006.json", tag / "rank-00006.json")
    return "rank-00006.json`: must be of rank 6 in the save step-00000001@"


def a_folder(tag: Path) -> str:
    (tag / "rank-00006.json").unlink()
    (tag / "rank-00006.json").mkdir()
    return "rank-00006.json`: must be a file of the checkpoint itself"


@pytest.mark.parametrize(
    "harm", [missing, cut, swapped, of_another_step, of_the_same_step_in_another_run, a_folder]
)
def test_a_description_that_is_not_the_ranks_own_is_named(harm: Callable[[Path], str], tag: Path) -> None:
    message = harm(tag)
    require_refused(tag, message)
    with pytest.raises(CheckpointError, match=r"rank-0000[26]\.json"):
        read_all(tag)


@pytest.mark.parametrize("name", ["__6_0.distcp", "rank-00006.pt"])
def test_a_file_that_a_description_names_is_looked_at(name: str, tag: Path) -> None:
    (tag / name).write_bytes((tag / name).read_bytes() + b" ")
    require_refused(tag, f"{name}`: must have the ")


def test_a_whole_rank_that_somebody_wrote_anew_is_noticed(tag: Path) -> None:
    """Its description is right about itself: the sum in the manifest is not."""
    files = read_manifest(tag).of_ranks
    found, _ = read_description(tag, files, 4)
    write_description(tag, replace(found, chunks=found.chunks[::-1]))
    require_refused(tag, "must hold the files that 8 ranks wrote; got others")


def lie(tag: Path, change: Callable[[Description], Description]) -> None:
    """A description that says something else, and is sealed."""
    files = read_manifest(tag).of_ranks
    write_description(tag, change(read_description(tag, files, 0)[0]))
    seal(tag)


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
        lie(tag, LIES[how])
        for entry in read_entries(tag):
            CheckpointReader(tag).check(entry)
        read_all(tag)


@pytest.mark.parametrize("name", ["../secret", "/dev/zero", "", ".."])
def test_no_description_leads_out_of_a_checkpoint(name: str, tag: Path) -> None:
    files = read_manifest(tag).of_ranks
    found, _ = read_description(tag, files, 0)
    shutil.copy(tag / "__0_0.distcp", tag.parent / "secret")
    write_description(tag, replace(found, tensors=replace(found.tensors, name=name)))
    require_refused(tag, "must name files that are in it")
    with pytest.raises(CheckpointError, match="must name files that are in it"):
        read_all(tag)


@pytest.mark.parametrize(
    "value", [3, [], {}, {"files": 3}, {"save": 1, "rank": "x", "files": [], "chunks": []}]
)
def test_a_sealed_text_that_is_no_description_is_named(value: Any, tag: Path) -> None:
    (tag / "rank-00000.json").write_text(f"{{{sealed('description', json.dumps(value))}}}\n")
    require_refused(tag, "rank-00000.json`: must be what rank 0 wrote")
    with pytest.raises(CheckpointError, match=r"rank-00000\.json"):
        read_all(tag)


@pytest.mark.parametrize("size", [10**30, -1, "x"])
def test_a_file_has_a_size(size: Any, tag: Path) -> None:
    files = read_manifest(tag).of_ranks
    found, _ = read_description(tag, files, 0)
    text = json.loads((tag / "rank-00000.json").read_text())
    text["description"]["files"][0]["bytes"] = size
    value = json.dumps(text["description"], separators=(",", ":"))
    (tag / "rank-00000.json").write_text(f"{{{sealed('description', value)}}}\n")
    require_refused(tag, found.tensors.name if size == -1 else "rank-00000.json")


def test_sums_are_of_all_ranks_in_any_order(tag: Path) -> None:
    files = read_manifest(tag).of_ranks
    each = [read_description(tag, files, rank)[1] for rank in range(8)]
    assert rank_files(files.save, 8, sum(each[::-1], NO_SUMS)) == files
    assert rank_files(files.save, 8, sum(each[1:], NO_SUMS)) != files
    assert files.bytes == sum(path.stat().st_size for path in [*tag.glob("rank-*"), *tag.glob("__*")])


# --- torch's index ---------------------------------------------------------------------------------------


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3, bias=False))


def test_of_many_ranks_there_is_no_metadata_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerodrift.checkpoint.save.FEW", 0)
    engine = zd.initialize(network(), config=CONFIG, device="cpu", quiet=True)
    checkpoints = zd.Checkpoints(engine, tmp_path, quiet=True)
    checkpoints.save("one")
    assert not (tmp_path / "one" / ".metadata").exists() and inspect(tmp_path / "one", verify=True).complete
    assert checkpoints.load("one").differences == ()
    engine.destroy()
