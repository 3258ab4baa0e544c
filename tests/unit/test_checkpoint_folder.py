"""Folders of checkpoints: publishing, removal, damage, values of a script's own, and locks."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import errno
import fcntl
import io
import itertools
import json
import os
import random
import time
import types
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from zerodrift.checkpoint import files
from zerodrift.checkpoint.files import Lock, LockOwner
from zerodrift.checkpoint.folder import CheckpointFolder, automatic
from zerodrift.checkpoint.manifest import (
    MANIFEST,
    NO_SUMS,
    Manifest,
    SavedParameter,
    damage,
    rank_files,
    read_entries,
    read_manifest,
    write_entries,
    write_manifest,
    write_whole,
)
from zerodrift.checkpoint.state import fingerprint, load, packed
from zerodrift.errors import CheckpointError, UnsupportedError
from zerodrift.files import is_locked, locked
from zerodrift.mesh import MeshShape
from zerodrift.record import encode

ENTRIES = (
    SavedParameter(("embed.weight", "head.weight"), (61, 32), "fp32", 0, ("exp_avg", "exp_avg_sq")),
    SavedParameter(("layers.0.up.weight",), (64, 32), "fp32", 0, ("exp_avg", "exp_avg_sq")),
    SavedParameter(("layers.1.up.weight",), (64, 32), "fp32", 0, ("exp_avg", "exp_avg_sq")),
    SavedParameter(("frozen",), (), "bf16", -1, ()),
)


def manifest(tag: str, step: int, run: str = "r1") -> Manifest:
    return Manifest(
        run=run,
        tag=tag,
        step=step,
        skipped=1,
        saved="2030-01-02T03:04:05+00:00",
        versions=(("zerodrift", "0.1.0"), ("torch", "2.13.0")),
        source="GPT",
        mode="bf16",
        stage=3,
        mesh=MeshShape(shard=4),
        digest="ab" * 32,
        optimizer="adamw",
        schedule="WarmupLR",
        loss_scale=1.0,
        lr=(1e-3,),
        ranks=4,
        parameters=4,
        elements=6049,
        files=(),
        of_ranks=rank_files("save", 0, NO_SUMS),
    )


def save(folder: CheckpointFolder, step: int, tag: str = "", run: str = "r1") -> Path:
    """Write a small checkpoint by the steps of a save."""
    tag = tag or automatic(step)
    new = folder.begin(tag)
    try:
        files = (write_entries(new.path, ENTRIES), write_whole(new.path / "__0_0.distcp", b"\1\2\3" * 1000))
        write_manifest(new.path, replace(manifest(tag, step, run), files=files))
        home = folder.publish(new)
    except BaseException:
        new.lock.release()  # and nothing else: what a killed save leaves stays where it is
        raise
    new.remove()
    return home


def test_what_is_published_is_the_newest(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "runs" / "a")
    assert folder.tags() == [] and folder.latest() == ""
    for step in (2, 10, 4):
        save(folder, step)
    assert folder.tags() == [automatic(2), automatic(4), automatic(10)]
    assert folder.latest() == automatic(4)
    assert folder.find("latest").name == automatic(4) and folder.find(automatic(2)).is_dir()
    found = read_manifest(folder.find("latest"))
    assert found.step == 4 and found.files[0].name == "parameters.json"
    assert read_entries(folder.find("latest")) == ENTRIES


@pytest.mark.parametrize("point", range(1, 12))
def test_wherever_a_publication_ends_there_is_a_checkpoint(
    point: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every system call that changes the folder fails in turn; the earlier checkpoint can be found."""
    folder, calls, steps = CheckpointFolder(tmp_path), itertools.count(1), (1, 2)
    save(folder, 1, "best")

    def failing(real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if next(calls) == point:
                raise OSError(28, "No space left on device")
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch, contextlib.suppress(OSError):
        for name in ("rename", "replace", "fsync"):
            patch.setattr(os, name, failing(getattr(os, name)))
        save(folder, 2, "best")
        steps = (2,)
    for _ in range(2):
        found = folder.find("latest")
        assert read_manifest(found).step in steps
        assert damage(found, read_manifest(found).files) == []
        folder.clean()  # and again after the next run has tidied up
    assert folder.unfinished() == []
    save(folder, 3, "best")
    assert read_manifest(folder.find("latest")).step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "latest"]


def test_only_what_was_written_to_its_end_is_found(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"must hold a checkpoint; got none\."):
        folder.find("latest")
    folder.begin("step-00000001").lock.release()
    with pytest.raises(CheckpointError, match="got none but 1 that was cut short"):
        folder.find("latest")
    with folder.begin("step-00000002") as new:
        assert folder.unfinished() == [new.path], "what a killed save left is gone"
        with pytest.raises(CheckpointError, match="must have one writer"):
            folder.begin("step-00000003")
    save(folder, 2)
    (tmp_path / "latest").unlink()
    assert folder.find("latest").name == automatic(2), "before anything names it"
    with pytest.raises(CheckpointError, match=r"got step-00000002\. Did you mean `step-00000002`\?"):
        folder.find("step-00000003")


def test_all_but_the_newest_go_and_chosen_tags_and_latest_stay(tmp_path: Path) -> None:
    """A run that went back has fewer steps than its earlier checkpoints."""
    folder = CheckpointFolder(tmp_path)
    for step in range(1, 6):
        save(folder, step)
    save(folder, 3, "best")
    assert folder.prune(2) == [automatic(1), automatic(2), automatic(3)]
    assert folder.tags() == ["best", automatic(4), automatic(5)]
    assert folder.prune(2) == []
    save(folder, 2)
    assert folder.prune(2) == [] and folder.latest() == automatic(2)


def test_no_bit_of_a_manifest_can_change_unseen(tmp_path: Path) -> None:
    path = save(CheckpointFolder(tmp_path), 1)
    good = (path / MANIFEST).read_bytes()
    for place in range(0, len(good), 11):
        data = bytearray(good)
        data[place] ^= 1 << (place % 8)
        (path / MANIFEST).write_bytes(data)
        with pytest.raises(CheckpointError, match="must be"):
            read_manifest(path)
    (path / MANIFEST).write_bytes(good[: len(good) // 2])
    with pytest.raises(CheckpointError, match="must be the manifest that was written"):
        read_manifest(path)


def write_lock(folder: Path, **changes: object) -> None:
    mine = Lock.take(folder)
    writer = {**encode(mine.owner), **changes}
    (folder / files.LOCK).write_text(json.dumps(writer))


@pytest.mark.parametrize(
    ("changes", "age"),
    [({"pid": 2**22 + 1}, 0.0), ({"born": "1"}, 0.0), ({"host": "elsewhere", "pid": 1}, files.STALE + 60)],
    ids=["the process is gone", "its number was given to another", "nobody touches one of another machine"],
)
def test_a_dead_owners_lock_is_broken(changes: dict[str, object], age: float, tmp_path: Path) -> None:
    write_lock(tmp_path, **changes)
    if age:
        with pytest.raises(CheckpointError, match="got process 1 on elsewhere, since 20"):
            Lock.take(tmp_path)
        os.utime(tmp_path / files.LOCK, (time.time() - age,) * 2)
    lock = Lock.take(tmp_path)
    lock.touch()
    assert lock.held
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_broken_is_not_taken_back(tmp_path: Path) -> None:
    lock = Lock.take(tmp_path)
    text = json.dumps(encode(LockOwner("elsewhere", 1, "", "now", "key")))
    (tmp_path / files.LOCK).write_text(text)
    assert not lock.held
    lock.touch()
    lock.release()
    assert (tmp_path / files.LOCK).read_text() == text


def test_a_lock_is_held_until_it_is_left_and_stops_nobody_where_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    with locked(path):
        assert is_locked(path)
    assert not is_locked(path)
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
    with locked(path), locked(path):
        assert is_locked(path)


# --- values of the state of a script -------------------------------------------------------------------


VALUES: dict[str, Any] = {
    "arguments": [argparse.Namespace(lr=0.1, files=[Path("b")]), types.SimpleNamespace(b={"c": (1, None)})],
    "numbers": [np.int64(3), np.bool_(True), np.float16(0.5), np.float64(0.5), 1j],
    "random": [np.random.RandomState(1).get_state(), random.Random(1).getstate()],
    "generator": np.random.default_rng(1).bit_generator.state,
    "when": [datetime.datetime(2026, 1, 2, 3), datetime.date(2026, 1, 2), datetime.timedelta(seconds=3)],
    "sets": [{2}, frozenset("a"), range(2, 9, 3), slice(1, None)],
    "counts": [collections.Counter("abca"), collections.OrderedDict(b=2)],
    "tensors": [torch.arange(3), torch.bfloat16, torch.Size([2]), torch.device("cpu")],
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_of_the_state_comes_back(name: str) -> None:
    found = load(io.BytesIO(packed({name: VALUES[name]}, "client")))[name]
    assert repr(found) == repr(VALUES[name]) and type(found) is type(VALUES[name])


def test_arrays_of_every_dtype_come_back() -> None:
    for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?":
        array = np.arange(6).astype(code).reshape(2, 3)
        found = load(io.BytesIO(packed({"array": array}, "client")))["array"]
        assert found.dtype == array.dtype and np.array_equal(found, array)


def test_what_cannot_be_read_again_is_named_where_it_is() -> None:
    for bad, kind in ((object(), "object"), (Path, "type"), (collections.deque([1]), "deque")):
        with pytest.raises(UnsupportedError) as raised:
            packed({"client": {"good": 1, "more": {"it": bad}}}, "client")
        assert raised.value.got == f"a {kind} at ['client']['more']['it']"


def test_client_states_are_alike_only_with_equal_values() -> None:
    array = np.zeros(5000)
    assert fingerprint({"a": array}) == fingerprint({"a": array.copy()})
    assert fingerprint([array]) != fingerprint([np.where(np.arange(5000) == 2500, 1.0, array)])
    assert fingerprint([[1], 2]) != fingerprint([[1, 2]])
