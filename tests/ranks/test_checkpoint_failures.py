"""Failures around a checkpoint give a clear error on every rank, and the older checkpoint loads."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.networks import GPT
from tests.numerics.runs import config, finish, make, train
from tests.ranks.harness import run_ranks
from zerodrift.api import make_plan
from zerodrift.checkpoint import save as saving
from zerodrift.checkpoint.checkpoints import Checkpoints
from zerodrift.checkpoint.files import Lock
from zerodrift.checkpoint.folder import CheckpointFolder
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


def refusal(call: Callable[[], Any]) -> str:
    """Return the message of a refusal."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    raise AssertionError("was not refused")


def alone(engine: Engine, change: Callable[[], Any]) -> None:
    """Change a file on rank 0, while the others wait."""
    engine.comm.barrier()
    if engine.mesh.rank() == 0:
        change()
    engine.comm.barrier()


def same(before: dict[str, torch.Tensor], engine: Engine) -> bool:
    after = finish(engine).weights
    return all(torch.equal(before[name], after[name]) for name in before)


# --- damage -----------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def damaged(folder: str, harm: Callable[[Path], None]) -> Any:
    """Damage every file of the newest checkpoint in turn, and one that is only checked as it is read."""
    engine, checkpoints = two(folder)
    newest = Path(folder) / NEW
    before = finish(engine).weights
    messages = {}
    for path in sorted(newest.iterdir()):
        kept = path.read_bytes()
        alone(engine, partial(harm, path))
        messages[path.name] = refusal(checkpoints.load)
        alone(engine, partial(path.write_bytes, kept))
    unchanged = same(before, engine)
    loaded = checkpoints.load(OLD)
    train(engine, 1)
    data = newest / "__1_0.distcp"
    alone(engine, lambda: data.write_bytes(b"\0" * data.stat().st_size))
    unseen = refusal(lambda: checkpoints.load(verify=False))
    engine.destroy()
    return messages, unchanged, loaded.step, unseen


MANIFEST = "checkpoint.json`: must be the manifest that was written"
LOST = f"must hold a checkpoint with the tag '{NEW}'; got {OLD}"


@pytest.mark.parametrize(
    ("harm", "must", "manifest"),
    [
        (flip, "must be the bits that were written; got others", MANIFEST),
        (cut, r"must have the [\d,]+ bytes that were written; got [\d,]+", MANIFEST),
        (Path.unlink, "must be there; got no such file", LOST),
    ],
    ids=["flipped", "cut", "removed"],
)
def test_a_damaged_file_is_named_on_every_rank_and_nothing_is_loaded(
    harm: Any, must: str, manifest: str, tmp_path: Path
) -> None:
    results = run_ranks(damaged, 2, str(tmp_path), harm)
    assert results[0] == results[1]
    messages, unchanged, step, unseen = results[0]
    assert unchanged and step == 1 and len(messages) == 11
    assert NEW in unseen and "must be readable" in unseen, "an error, not a crash"
    assert manifest in messages.pop("checkpoint.json")
    for name, message in messages.items():
        of_rank = re.fullmatch(r"rank-0000(\d)\.json", name)
        expected = f"must be what rank {of_rank[1]} wrote; got " if of_rank and harm in (flip, cut) else must
        assert name in message and re.search(expected, message), message
        assert "Load an older checkpoint" in message


# --- something else ---------------------------------------------------------------------------------------


def refusals(folder: str) -> dict[str, str]:
    """Return the messages of loads with other models, other configs and other moments."""
    engine, _ = two(folder)
    engine.destroy()
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}
    messages = {}
    for what, written, model in (
        ("model", config(3, "bf16"), GPT(layers=1, width=48, tied=False)),
        ("tie", config(3, "bf16"), GPT(tied=False)),
        ("schedule", config(3, "bf16", scheduler=scheduler), GPT()),
        ("scale", config(3, "fp16"), GPT()),
        ("optimizer", config(3, "bf16", optimizer={"type": "SGD", "params": {"lr": 1e-3}}), GPT()),
    ):
        engine = make(written, model)
        before = finish(engine).weights
        messages[what] = refusal(Checkpoints(engine, folder, quiet=True).load)
        assert same(before, engine)
        engine.destroy()
    engine = make(config(3, "bf16", 2))
    checkpoints = Checkpoints(engine, f"{folder}/none", quiet=True)
    assert checkpoints.resume() is None
    messages["nothing"] = refusal(checkpoints.load)
    messages["path"] = refusal(lambda: checkpoints.load("../etc"))
    engine.backward(engine(torch.zeros(1, 4, dtype=torch.long)))
    engine.step()
    for call in (checkpoints.save, checkpoints.load):
        with pytest.raises(ZerodriftError, match="must be called between steps; got 1 micro-batch"):
            call()
    engine.destroy()
    return messages


REFUSALS = {
    "model": (
        "is of another model",
        "`layers.0.mlp.up.weight`: must have shape [96, 48]; got [64, 32]",
        "must hold no parameter that the model does not have; got `layers.1.",
        "`embed.weight`: must have shape [61, 48]",
        "norm.bias",
    ),
    "tie": ("must be one parameter under the names embed.weight; got embed.weight, head.weight",),
    "schedule": ("`schedule`: must be none, as when it was saved; got WarmupLR",),
    "scale": ("`loss scale`: must not be there", "allow=('loss_scale',)"),
    "optimizer": ("`optimizer`: must be adamw",),
    "nothing": ("got no such folder",),
    "path": ("must hold a checkpoint with the tag '../etc'",),
}


def test_what_does_not_fit_is_refused_with_all_that_differs(tmp_path: Path) -> None:
    results = run_ranks(refusals, 2, str(tmp_path))
    assert results[0] == results[1]
    for what, parts in REFUSALS.items():
        assert all(part in results[0][what] for part in parts), results[0][what]


# --- a save that fails ------------------------------------------------------------------------------------


def no_room(folder: str, asynchronous: bool) -> Any:
    """Fill the disk on the last rank, in the middle of its file."""
    engine, checkpoints = two(folder)
    checkpoints = Checkpoints(engine, folder, quiet=True, asynchronous=asynchronous)
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
    if engine.micro_batches:
        engine.step()  # the step that was told of it goes on
    names = sorted(path.name for path in Path(folder).iterdir())
    checkpoints.save("after")
    checkpoints.wait()
    loaded = checkpoints.load(NEW)
    engine.destroy()
    return message, names, loaded.step


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "beside training"])
def test_a_full_disk_leaves_what_was_there(asynchronous: bool, tmp_path: Path) -> None:
    results = run_ranks(no_room, 2, str(tmp_path), asynchronous)
    assert results[0] == results[1]
    message, names, step = results[0]
    assert "must be written; got File too large" in message and "GB are free in" in message
    assert names == ["latest", OLD, NEW], "nothing of the failed save is left, nor a lock"
    assert step == 2


def refused_saves(folder: str) -> Any:
    """Save an unpicklable state, beside another writer, and over another run's."""
    engine, checkpoints = two(folder)
    client = {"bad": object() if engine.mesh.rank() == 1 else 1}
    unreadable = refusal(lambda: checkpoints.save("odd", client=client))
    held = Lock.take(Path(folder)) if engine.mesh.rank() == 0 else None
    while_held = refusal(lambda: checkpoints.save("now"))
    if held is not None:
        held.release()
    checkpoints.save("now")
    engine.destroy()
    engine = make(config(3, "bf16"))
    other = Checkpoints(engine, folder, quiet=True)
    not_mine = refusal(other.save)
    at_once = refusal(lambda: train(engine, 1))
    engine.zero_grad()
    other.load()
    train(engine, 1)
    other.save("mine-now")
    engine.destroy()
    return unreadable, while_held, not_mine, at_once


def test_a_folder_has_one_writer_and_states_that_can_be_read(tmp_path: Path) -> None:
    results = run_ranks(refused_saves, 2, str(tmp_path))
    assert results[0] == results[1]
    unreadable, while_held, not_mine, at_once = results[0]
    assert "`client`: must be made of numbers" in unreadable
    assert "must have one writer; got process" in while_held and "save to another folder" in while_held
    assert f"must hold checkpoints of this run alone; got {OLD}, now, {NEW} of another" in not_mine
    assert at_once == not_mine, "with the first step, before work is lost"


# --- a rank that dies -------------------------------------------------------------------------------------


def kill_at(event: str, word: str) -> None:
    """Kill this process before Python's next operation on a file of that name."""

    def hook(found: str, arguments: tuple[Any, ...]) -> None:
        if found == event and arguments and word in str(arguments[0]):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def dies(folder: str, who: int, event: str, word: str, load: bool) -> Any:
    plan = make_plan(config(3, "bf16"), GPT(), 2)
    engine = Engine(plan, start(plan.mesh, "cpu", TIMEOUT), partial(NativeExecutor, plan, GPT()))
    checkpoints = Checkpoints(engine, folder, quiet=True)
    checkpoints.load(NEW)
    train(engine, 1)
    engine.comm.barrier()
    if engine.mesh.rank() == who:
        kill_at(event, word)
    began = time.monotonic()
    try:
        checkpoints.load(OLD) if load else checkpoints.save()
    except RankError:
        engine.destroy()
        return time.monotonic() - began
    raise AssertionError("nobody missed it")


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
    names = sorted(path.name for path in Path(folder).iterdir() if path.name[0] == ".")
    engine.destroy()
    return loaded.step, names


POINTS = [
    (0, "open", "distcp", False),
    (1, "open", "distcp", False),
    (1, "open", "rank-00001.pt", False),
    (1, "open", "rank-00001.json", False),
    (0, "open", "checkpoint.json", False),
    (0, "os.rename", ".writing-", False),
    (0, "open", "distcp", True),
    (1, "open", "rank-00001.json", True),
]
"""(rank that is killed, event, file), in a save or a load."""


@pytest.fixture(scope="module")
def twice_saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("twice") / "saved"
    run_ranks(saved, 2, str(folder))
    return folder


@pytest.mark.cells(1)
@pytest.mark.parametrize(("who", "event", "word", "load"), POINTS, ids=str)
def test_a_rank_that_dies_costs_that_save_or_load_alone(
    who: int, event: str, word: str, load: bool, twice_saved: Path, tmp_path: Path
) -> None:
    folder = str(shutil.copytree(twice_saved, tmp_path / "saved", symlinks=True))
    results = run_ranks(dies, 2, folder, who, event, word, load, dying={who})
    assert results[who] is None and results[1 - who] < 3 * TIMEOUT
    for step, names in run_ranks(comes_back, 2, folder):
        assert step == 2 and names == [], "what the dead save left is gone"


# --- beside training --------------------------------------------------------------------------------------


def slow_disk(folder: str) -> Any:
    """Save beside training: the checkpoint appears some steps later, with the state of the save."""
    engine, _ = two(folder)
    checkpoints = Checkpoints(engine, folder, quiet=True, asynchronous=True)
    checkpoints.load()
    real = saving.write_items
    go = Path(folder).parent / "go"

    def waits(*arguments: Any) -> Any:
        while not go.exists():
            time.sleep(0.01)
        return real(*arguments)

    saving.write_items = waits  # type: ignore[assignment]
    expected = finish(engine).weights
    checkpoints.save("beside")
    train(engine, 2)
    folder_of = CheckpointFolder(folder)
    early = folder_of.tags()
    engine.comm.barrier()
    go.touch()
    while checkpoints._pending is not None:
        train(engine, 1)
    late = folder_of.tags()
    checkpoints.load("beside")
    saved_state = same(expected, engine)
    checkpoints.save("last")
    engine.destroy()  # waits for it
    return early, late, folder_of.tags(), saved_state


def test_a_save_beside_training_is_of_the_state_that_was_saved(tmp_path: Path) -> None:
    for early, late, last, same in run_ranks(slow_disk, 2, str(tmp_path / "c")):
        assert early == [OLD, NEW] and set(late) == {OLD, NEW, "beside"}
        assert set(last) == {OLD, NEW, "beside", "last"} and same


def gives_up(folder: str) -> Any:
    """End a run by an exception, without waiting for a pending save."""
    engine, _ = two(folder)
    checkpoints = Checkpoints(engine, folder, quiet=True, asynchronous=True)
    checkpoints.load()
    checkpoints.save("never")
    try:
        try:
            raise KeyboardInterrupt
        finally:
            engine.destroy()
    except KeyboardInterrupt:
        return sorted(path.name for path in Path(folder).iterdir())


def test_an_exception_gives_up_a_save_beside_training(tmp_path: Path) -> None:
    run_ranks(gives_up, 2, str(tmp_path))
    left = {path.name for path in tmp_path.iterdir()}  # rank 1 may write while rank 0 removes the folder
    assert {name for name in left if not name.startswith(".writing-never@")} == {"latest", OLD, NEW}


# --- what one rank reads ----------------------------------------------------------------------------------


def only_one_sees(folder: str) -> Any:
    """Show rank 1 another folder, as a file system that is behind does; all follow rank 0."""
    engine, checkpoints = two(folder)
    if engine.mesh.rank() == 1:
        checkpoints._folder = CheckpointFolder(f"{folder}-not-yet")
    loaded = checkpoints.resume()
    found = None if loaded is None else loaded.tag
    latest = Path(folder) / "latest"
    alone(engine, lambda: latest.write_bytes(b"\xff"))
    message = refusal(checkpoints.resume)
    alone(engine, lambda: (latest.unlink(), (latest.parent / NEW / "checkpoint.json").unlink()))
    half = refusal(checkpoints.resume)
    engine.destroy()
    return found, message, half


def test_one_rank_reads_latest_and_all_agree(tmp_path: Path) -> None:
    results = run_ranks(only_one_sees, 2, str(tmp_path / "run"))
    assert results[0] == results[1]
    found, message, half = results[0]
    assert found == NEW and "what is no UTF-8" in message
    assert f"got files of {NEW} without `checkpoint.json`" in half and "copied in part" in half
