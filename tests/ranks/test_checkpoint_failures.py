"""Failures around a checkpoint give a clear error on every rank, and the older checkpoint loads."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_files import seal
from tests.numerics.networks import GPT
from tests.numerics.runs import config, diff, finish, make, train
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.refusals import error_of
from zerodrift.api import make_plan
from zerodrift.checkpoint import save as saving
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.checkpoint.files import Lock
from zerodrift.checkpoint.folder import CheckpointFolder
from zerodrift.checkpoint.manifest import read_description, read_manifest, write_description
from zerodrift.comm.mesh import start
from zerodrift.engine.engine import Engine
from zerodrift.engine.native_executor import NativeExecutor
from zerodrift.errors import CheckpointError, RankError, ZerodriftError

pytestmark = pytest.mark.fresh_ranks

OLD, NEW = "step-00000001", "step-00000002"
TIMEOUT = 4.0
"""Timeout of collectives where a rank is missing."""


def two(folder: str) -> tuple[Engine, Checkpoints]:
    """Return an engine that has saved after its first and its second step."""
    engine = make(config(3, "bf16"))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    for _ in range(2):
        train(engine, 1)
        checkpoints.save()
    return engine, checkpoints


refusal = partial(error_of, CheckpointError)


def alone(engine: Engine, change: Callable[[], Any]) -> None:
    """Change a file on rank 0, while the others wait."""
    engine.comm.barrier()
    if engine.mesh.rank() == 0:
        change()
    engine.comm.barrier()


def same(before: dict[str, torch.Tensor], engine: Engine) -> bool:
    return diff(before, finish(engine).weights) == []


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty_description(tag: Path) -> None:
    """Remove the tensors of rank 1 from a checkpoint whose checksums are right."""
    found, _ = read_description(tag, read_manifest(tag).of_ranks, 1)
    write_description(tag, replace(found, chunks=()))
    seal(tag)


MANIFEST = "checkpoint.json`: must be the manifest that was written"
LOST = f"must hold a checkpoint with the tag '{NEW}'; got {OLD}"
HARMS: list[tuple[Callable[[Path], None], str, str]] = [
    (flip, "must be the bits that were written; got others", MANIFEST),
    (cut, r"must have the [\d,]+ bytes that were written; got [\d,]+", MANIFEST),
    (Path.unlink, "must be there; got no such file", LOST),
]
"""(harm, what is said of any file, what is said of the manifest)."""


@on_ranks(2)
def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(tmp_path: Path) -> None:
    """Every file of the newest checkpoint is damaged in turn, and one that is only checked as it is read."""
    engine, checkpoints = two(str(tmp_path))
    newest, before = tmp_path / NEW, finish(engine).weights
    files = sorted(newest.iterdir())
    assert len(files) == 11
    for path, (harm, must, manifest) in itertools.product(files, HARMS):
        kept = path.read_bytes()
        alone(engine, partial(harm, path))
        message = refusal(checkpoints.load)
        alone(engine, partial(path.write_bytes, kept))
        of_rank = re.fullmatch(r"rank-0000(\d)\.json", path.name)
        expected = f"must be as rank {of_rank[1]} wrote it; got " if of_rank and harm in (flip, cut) else must
        if path.name == "checkpoint.json":
            assert manifest in message, message
        else:
            assert path.name in message and re.search(expected, message), message
            assert "Load an older checkpoint" in message
    kept_files = {path: path.read_bytes() for path in newest.glob("*.json")}
    alone(engine, partial(empty_description, newest))
    lacking = refusal(checkpoints.load)
    assert "must hold each element" in lacking and "replaced in part" not in lacking, lacking
    alone(engine, lambda: [path.write_bytes(data) for path, data in kept_files.items()])
    assert same(before, engine)
    assert checkpoints.load(OLD).step == 1
    train(engine, 1)
    data = newest / "__1_0.distcp"
    alone(engine, lambda: data.write_bytes(b"\0" * data.stat().st_size))
    unseen = refusal(lambda: checkpoints.load(verify=False))
    assert NEW in unseen and "must be readable" in unseen, "an error, not a crash"


SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
SGD_MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 1e-3, "momentum": 0.9}}}
OTHER = (
    "is of another model",
    "`layers.0.mlp.up.weight`: must have shape [96, 48]; got [64, 32]",
    "must hold no parameter that the model does not have; got `layers.1.",
)
UNTIED = ("must be one parameter under the names embed.weight; got embed.weight, head.weight",)
OTHERS: list[tuple[str, dict[str, Any], GPT, tuple[str, ...]]] = [
    ("bf16", {}, GPT(layers=1, width=48, tied=False), OTHER),
    ("bf16", {}, GPT(tied=False), UNTIED),
    ("bf16", SCHEDULER, GPT(), ("`schedule`: must be none, as when it was saved; got WarmupLR",)),
    ("fp16", {}, GPT(), ("`loss scale`: must not be there", "allow=('loss_scale',)")),
    ("bf16", SGD, GPT(), ("`optimizer`: must be adamw",)),
]


@on_ranks(2)
def test_what_does_not_fit_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    engine, _ = two(str(tmp_path))
    engine.destroy()
    for mode, rest, model, parts in OTHERS:
        engine = make(config(3, mode, **rest), model)
        before = finish(engine).weights
        message = refusal(Checkpoints(engine, tmp_path, quiet=True).load)
        assert all(part in message for part in parts) and same(before, engine), message
        engine.destroy()
    engine = make(config(3, "bf16", **SGD_MOMENTUM))
    train(engine, 1)
    Checkpoints(engine, tmp_path / "momentum", quiet=True).save()
    engine.destroy()
    engine = make(config(3, "bf16", **SGD))
    checkpoints = Checkpoints(engine, tmp_path / "momentum", quiet=True)
    message = refusal(lambda: checkpoints.load(allow=("groups",)))
    assert "must have been saved with the moments none; got momentum_buffer too" in message
    engine.destroy()
    engine = make(config(3, "bf16", 2))
    checkpoints = Checkpoints(engine, tmp_path / "none", quiet=True)
    assert checkpoints.resume() is None
    assert "got no such folder" in refusal(checkpoints.load)
    assert "must hold a checkpoint with the tag '../etc'" in refusal(lambda: checkpoints.load("../etc"))
    engine.backward(engine(torch.zeros(1, 4, dtype=torch.long)))
    engine.step()
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(ZerodriftError, match="must be called between steps; got 1 micro-batch"):
            call()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside training"])
@on_ranks(2)
def test_a_full_disk_leaves_what_was_there(asynchronous: bool, tmp_path: Path) -> None:
    """The last rank has no space in the middle of its file."""
    engine, _ = two(str(tmp_path))
    checkpoints = Checkpoints(engine, tmp_path, quiet=True, asynchronous=asynchronous)
    checkpoints.load()
    train(engine, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if engine.mesh.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))

    def save() -> None:
        checkpoints.save()
        checkpoints._pending and checkpoints._pending._thread.join()  # type: ignore[union-attr]
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        train(engine, 1)
        checkpoints.save()

    message = refusal(save)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "must be written; got File too large" in message and "GB are free in" in message
    if engine.micro_batches:
        engine.step()  # the step that was told of it goes on
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", OLD, NEW], "nothing of the failed save is left, nor a lock"
    checkpoints.save("after")
    checkpoints.wait()
    assert checkpoints.load(NEW).step == 2


@on_ranks(2)
def test_a_folder_has_one_writer_and_states_that_can_be_read(tmp_path: Path) -> None:
    """A state cannot be pickled; another process writes; the folder is another run's."""
    engine, checkpoints = two(str(tmp_path))
    client = {"bad": object() if engine.mesh.rank() == 1 else 1}
    assert "`client`: must be made of numbers" in refusal(lambda: checkpoints.save("odd", client=client))
    held = Lock.take(tmp_path) if engine.mesh.rank() == 0 else None
    while_held = refusal(lambda: checkpoints.save("now"))
    assert "must have one writer; got process" in while_held and "save to another folder" in while_held
    if held is not None:
        held.release()
    checkpoints.save("now")
    engine.destroy()
    engine = make(config(3, "bf16"))
    other = Checkpoints(engine, tmp_path, quiet=True)
    not_mine = refusal(other.save)
    assert f"must hold only checkpoints of this run; got {OLD}, now, {NEW} of another" in not_mine
    assert refusal(lambda: train(engine, 1)) == not_mine, "with the first step, before work is lost"
    engine.zero_grad()
    other.load()
    train(engine, 1)
    other.save("mine-now")


def kill_at(event: str, word: str) -> None:
    """Kill this process before Python's next operation on a file of that name."""

    def hook(found: str, arguments: tuple[Any, ...]) -> None:
        if found == event and arguments and word in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def dies(folder: str, who: int, event: str, word: str, load: bool) -> float:
    """Return the seconds in which this rank misses the one that is killed."""
    plan = make_plan(config(3, "bf16"), GPT(), 2)
    engine = Engine(plan, start(plan.mesh, "cpu", TIMEOUT), partial(NativeExecutor, plan, GPT()))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    checkpoints.load(NEW)
    train(engine, 1)
    engine.comm.barrier()
    if engine.mesh.rank() == who:
        kill_at(event, word)
    began = time.monotonic()
    with pytest.raises(RankError):
        checkpoints.load(OLD) if load else checkpoints.save()
    engine.destroy()
    return time.monotonic() - began


def saved(folder: str) -> None:
    two(folder)[0].destroy()


def comes_back(folder: str) -> Any:
    """Start the next run: load the newest checkpoint, and save."""
    engine = make(config(3, "bf16"))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    loaded = checkpoints.resume()
    assert loaded is not None
    train(engine, 1)
    checkpoints.save("next")
    engine.comm.barrier()
    return loaded.step, sorted(path.name for path in Path(folder).iterdir() if path.name[0] == ".")


POINTS = [
    (1, "open", "distcp", False),
    (1, "open", "rank-00001.json", False),
    (0, "open", "checkpoint.json", False),
    (0, "os.rename", ".writing-", False),
    (0, "open", "distcp", True),
]
"""(rank that is killed, event, file), in a save or a load."""


@pytest.fixture(scope="module")
def twice_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twice") / "saved"
    run_ranks(saved, 2, str(folder))
    return folder


@pytest.mark.parametrize(("who", "event", "word", "load"), POINTS, ids=str)
def test_a_rank_that_dies_costs_that_save_or_load_alone(
    who: int, event: str, word: str, load: bool, twice_saved: Path, tmp_path: Path
) -> None:
    folder = str(shutil.copytree(twice_saved, tmp_path / "saved", symlinks=True))
    results = run_ranks(dies, 2, folder, who, event, word, load, dying={who})
    assert results[who] is None and results[1 - who] < 3 * TIMEOUT
    for step, names in run_ranks(comes_back, 2, folder):
        assert step == 2 and names == [], "what the dead save left is gone"


@on_ranks(2)
def test_a_save_beside_training_is_of_the_state_that_was_saved(tmp_path: Path) -> None:
    """On a slow disk the checkpoint appears some steps later."""
    engine, _ = two(str(tmp_path / "run"))
    checkpoints = Checkpoints(engine, tmp_path / "run", quiet=True, asynchronous=True)
    checkpoints.load()
    real, go, tags = saving.write_items, tmp_path / "go", CheckpointFolder(tmp_path / "run").tags

    def waits(*arguments: Any) -> Any:
        while not go.exists():
            time.sleep(0.01)
        return real(*arguments)

    saving.write_items = waits  # type: ignore[assignment]
    expected = finish(engine).weights
    checkpoints.save("beside")
    train(engine, 2)
    assert tags() == [OLD, NEW]
    engine.comm.barrier()
    go.touch()
    while checkpoints._pending is not None:
        train(engine, 1)
    checkpoints.load("beside")
    assert same(expected, engine)
    checkpoints.save("last")
    engine.destroy()  # waits for it
    assert set(tags()) == {OLD, NEW, "beside", "last"}


@on_ranks(2)
def test_an_exception_gives_up_a_save_beside_training(tmp_path: Path) -> None:
    """A run ends by an exception, without waiting for a pending save."""
    engine, _ = two(str(tmp_path))
    checkpoints = Checkpoints(engine, tmp_path, quiet=True, asynchronous=True)
    checkpoints.load()
    checkpoints.save("never")
    with pytest.raises(KeyboardInterrupt), contextlib.ExitStack() as stack:
        stack.callback(engine.destroy)
        raise KeyboardInterrupt
    torch.distributed.barrier()
    left = {path.name for path in tmp_path.iterdir()}  # rank 1 may write while rank 0 removes the folder
    assert {name for name in left if not name.startswith(".writing-never@")} == {"latest", OLD, NEW}


@on_ranks(2)
def test_one_rank_reads_latest_and_all_agree(tmp_path: Path) -> None:
    """Rank 1 sees another folder, as on a file system that is behind; all follow rank 0."""
    folder = tmp_path / "run"
    engine, checkpoints = two(str(folder))
    if engine.mesh.rank() == 1:
        checkpoints._folder = CheckpointFolder(f"{folder}-not-yet")
    loaded = checkpoints.resume()
    assert loaded is not None and loaded.tag == NEW
    latest = folder / "latest"
    alone(engine, lambda: latest.write_bytes(b"\xff"))
    assert "bytes that are not UTF-8" in refusal(checkpoints.resume)
    alone(engine, lambda: (latest.unlink(), (folder / NEW / "checkpoint.json").unlink()))
    half = refusal(checkpoints.resume)
    assert f"got files of {NEW} without `checkpoint.json`" in half and "copied in part" in half
