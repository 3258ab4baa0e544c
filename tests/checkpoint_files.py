"""Write the checkpoint of many ranks in one process, and check its layout."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.unit.test_checkpoint_folder import manifest
from zerodrift.checkpoint.folder import CheckpointFolder, save_of
from zerodrift.checkpoint.manifest import (
    NO_SUMS,
    Description,
    SavedParameter,
    measured,
    rank_files,
    read_description,
    read_manifest,
    read_plan,
    state_file,
    tensors_file,
    write_description,
    write_entries,
    write_manifest,
    write_plan,
    write_whole,
)
from zerodrift.checkpoint.tensors import Item, holders, moment_key, weight_key, write_items
from zerodrift.model.safetensors import list_tensors
from zerodrift.plan.table import Plan

MOMENTS = ("exp_avg",)


def value(key: str, numel: int) -> torch.Tensor:
    """Return values that differ between tensors."""
    return torch.arange(numel, dtype=torch.float32) + zlib.crc32(key.encode()) % 1000


def runs(plan: Plan, rank: int) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, stop) of a rank's share at stage 3, by cutting each segment into equal slices."""
    for segment in plan.segments:
        size = segment.padded // plan.mesh.shard
        for row in (plan.rows[index] for index in segment.rows):
            mine = np.arange(row.offset, row.offset + row.numel) // size == rank
            places = np.flatnonzero(mine)
            if len(places):
                yield row.name, int(places[0]), int(places[-1]) + 1


def save_as_ranks(folder: Path, plan: Plan, step: int = 1) -> Path:
    """Write the files of all ranks of a plan of stage 3, one rank after the other."""
    home = CheckpointFolder(folder)
    with home.begin(f"step-{step:08d}") as new:
        sums, ranks = NO_SUMS, plan.mesh.world
        for rank in range(ranks):
            items = [
                Item(key, plan.row(name).numel, start, value(key, stop)[start:])  # type: ignore[union-attr]
                for name, start, stop in runs(plan, rank)
                for key in (weight_key(name), *(moment_key(moment, name) for moment in MOMENTS))
            ]
            tensors, chunks = write_items(new.path / tensors_file(rank), items)
            state = write_whole(new.path / state_file(rank), b"")
            written = Description(save_of(new.path), rank, tensors, state, tuple(chunks))
            sums = sums + write_description(new.path, written)
        table = [SavedParameter(row.names, row.shape, "fp32", 0, MOMENTS) for row in plan.rows]
        files = (write_entries(new.path, table), write_plan(new.path, plan.to_json()))
        head = manifest(home.path.name, step)
        of_ranks = rank_files(save_of(new.path), ranks, sums)
        write_manifest(new.path, replace(head, mesh=plan.mesh, files=files, of_ranks=of_ranks))
        return home.publish(new)


def seal(tag: Path) -> None:
    """Write the manifest and the descriptions of the files of a checkpoint, after a test has changed them."""
    head = read_manifest(tag)
    files = tuple(measured(tag / file.name) for file in head.files)
    of_ranks, sums = head.of_ranks, NO_SUMS
    for rank in range(of_ranks.ranks):
        found, _ = read_description(tag, of_ranks, rank)
        here = replace(
            found, tensors=measured(tag / tensors_file(rank)), state=measured(tag / state_file(rank))
        )
        sums = sums + write_description(tag, here)
    of_ranks = rank_files(of_ranks.save, of_ranks.ranks, sums)
    write_manifest(tag, replace(head, files=files, of_ranks=of_ranks))


def misplaced_chunks(tag: Path) -> list[str]:
    """Return the chunks that lie with another rank than the plan's."""
    head, plan = read_manifest(tag), read_plan(tag)
    assert plan is not None
    replicas = plan.mesh.replicate if plan.policy.backend == "fsdp2" else 1  # any of which may have it
    wrong = []
    for rank in range(head.of_ranks.ranks):
        chunks = read_description(tag, head.of_ranks, rank)[0].chunks
        for chunk in chunks:
            kind, _, name = chunk.key.partition(".")
            name = name if kind == "weights" else name.partition(".")[2]
            said = list(holders(plan, name, chunk.start, chunk.start + chunk.count))
            if rank not in said or len(said) != replicas:
                wrong.append(f"{chunk.key}[{chunk.start}:+{chunk.count}] of rank {rank}, by the rule {said}")
    return wrong


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of all safetensors files in a folder, which must belong together."""
    list_tensors(folder)
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found
