"""Checkpoints and folders of untrusted origin: nothing in them runs, no path leads out of them, and
anything but a file in the place of one is an error."""

from __future__ import annotations

import ast
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift as zd
from tests.checkpoint_files import seal
from tests.unit.deepspeed_layout import lay_out, values
from tests.unit.sources import PATHS, name_of, source, tree
from zerodrift.api import initialize
from zerodrift.checkpoint.folder import CheckpointFolder, latest_text, read_latest
from zerodrift.checkpoint.inspection import inspect
from zerodrift.checkpoint.manifest import read_manifest, write_manifest
from zerodrift.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from zerodrift.errors import ZerodriftError
from zerodrift.weights.converter import convert
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed

TAG = "step-00000003"
CONFIG = {"precision": {"mode": "bf16"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.GELU(), torch.nn.Linear(5, 3, bias=False))


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    convert(lay_out(place / "theirs", 2), place / "ours")
    return place / "ours"


@pytest.fixture
def ours(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "ours"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    made = initialize(network(), None, CONFIG, device="cpu", quiet=True)
    yield made
    made.destroy()


READERS: dict[str, Callable[[Any, Path, Path], object]] = {
    "load": lambda engine, run, out: zd.Checkpoints(engine, run, quiet=True).load(),
    "load without looking": lambda engine, run, _: zd.Checkpoints(engine, run, quiet=True).load(verify=False),
    "resume": lambda engine, run, out: zd.Checkpoints(engine, run, quiet=True).resume(),
    "convert": lambda engine, run, out: convert(run, out),
    "zero_to_fp32": lambda engine, run, out: get_fp32_state_dict_from_zero_checkpoint(run),
}


def every_reader_refuses(engine: Any, run: Path, out: Path, match: str) -> None:
    for name, read in READERS.items():
        before = {key: value.clone() for key, value in engine.module.state_dict().items()}
        with pytest.raises(ZerodriftError, match=match):
            read(engine, run, out)
        assert not out.exists(), name
        after = engine.module.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before), name


def test_what_is_whole_is_read_by_all(engine: Any, ours: Path, tmp_path: Path) -> None:
    (ours / TAG / ".metadata").write_bytes(b"for torch alone")
    seal(ours / TAG)
    for read in READERS.values():
        assert read(engine, ours, tmp_path / "out") is not None
    for name, value in values(0).items():
        assert torch.equal(engine.parameter(name).master, value)


@pytest.mark.parametrize("version", [1, 3])
def test_another_format_is_one_error(version: int, engine: Any, ours: Path, tmp_path: Path) -> None:
    path = ours / TAG / "checkpoint.json"
    path.write_text(path.read_text().replace('"format": 2', f'"format": {version}', 1))
    every_reader_refuses(engine, ours, tmp_path / "out", f"must be a checkpoint of format 2; got {version}")


# --- code ---------------------------------------------------------------------------------------------------


class Planted:
    """An object that calls a function when it is unpickled."""

    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        self.what, self.arguments = what, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.what, self.arguments


def payloads(proof: Path) -> dict[str, Any]:
    call = f"open({str(proof)!r}, 'w').close()"
    return {"a command": Planted(os.system, f"touch {proof}"), "eval": Planted(eval, call)}


PAYLOADS = list(payloads(Path()))


@pytest.mark.parametrize("what", PAYLOADS)
@pytest.mark.parametrize("name", ["shared.pt", "rank-00000.pt", "__0_0.distcp"])
def test_nothing_in_the_other_files_runs(
    name: str, what: str, ours: Path, engine: Any, tmp_path: Path
) -> None:
    proof, tag = tmp_path / "ran", ours / TAG
    torch.save({"buffers": {}, "client": payloads(proof)[what]}, tag / name)
    seal(tag)
    for read in READERS.values():
        try:
            read(engine, ours, tmp_path / "out")
        except ZerodriftError as error:
            assert "must be readable" in str(error)
        else:
            assert name == "rank-00000.pt"  # which not every reader needs
        assert not proof.exists()


@pytest.mark.parametrize("what", PAYLOADS)
@pytest.mark.parametrize("pattern", ["mp_rank*", "*optim*"])
def test_nothing_in_a_deepspeed_file_runs(what: str, pattern: str, tmp_path: Path) -> None:
    proof, folder = tmp_path / "ran", lay_out(tmp_path / "theirs", 2)
    path = next(folder.glob(f"global_step3/{pattern}"))
    state = torch.load(path, weights_only=False)
    torch.save({**state, "surprise": payloads(proof)[what]}, path)
    with pytest.raises(ZerodriftError, match=r"which only its own code can read|must be readable"):
        open_deepspeed(folder)
    assert not proof.exists()


def test_every_place_that_unpickles_is_restricted() -> None:
    """The source is searched: a new place needs an entry here with its reason."""
    found = set()
    risky = re.compile("pickle|marshal|shelve|dill|joblib|dcp|eval|exec|torch.load|FileSystemReader")
    for path in (path for path in PATHS if risky.search(source(path))):
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            options = {word.arg: ast.unparse(word.value) for word in node.keywords}
            runs = name == "torch.load" and options.get("weights_only") != "True"
            runs |= options.get("allow_pickle", "False") != "False"
            runs |= name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "joblib", "dcp")
            runs |= name in ("eval", "exec", "FileSystemReader")
            if runs:
                found.add(f"{name_of(path)}: {name}")
    # `trust` is what a person says of files of their own; `dumps` writes, for a hash.
    assert found == {"comm/collectives.py: pickle.dumps", "weights/deepspeed/files.py: torch.load"}


# --- paths --------------------------------------------------------------------------------------------------


PLACES = [
    *((f"{TAG}/checkpoint.json", kind) for kind in ("FIFO", "device", "folder", "link")),
    *((f"{TAG}/__0_0.distcp", kind) for kind in ("FIFO", "device", "link")),
    *((f"{TAG}/{name}", "link") for name in ("shared.pt", "parameters.json", "rank-00000.json")),
    *(("latest", kind) for kind in ("FIFO", "device", "folder")),
]


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_a_file_of_a_checkpoint_is_a_file(
    name: str, kind: str, ours: Path, engine: Any, tmp_path: Path
) -> None:
    """A FIFO must not wait, a device must not be read for ever, and a link may lead to secrets."""
    path = ours / name
    path.rename(tmp_path / "elsewhere")
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "elsewhere")
    every_reader_refuses(
        engine, ours, tmp_path / "out", "latest`: must be a file" if name == "latest" else "must"
    )


def test_a_manifest_names_files_that_are_in_its_folder(ours: Path, engine: Any, tmp_path: Path) -> None:
    tag = ours / TAG
    manifest = read_manifest(tag)
    for name in ("../../elsewhere", "/dev/zero", "/etc/passwd"):
        file = replace(manifest.files[0], name=name, bytes=0)
        write_manifest(tag, replace(manifest, files=(*manifest.files[1:], file)))
        with pytest.raises(ZerodriftError, match="must name files that are in it"):
            convert(ours, tmp_path / "out")
        assert not inspect(tag, verify=True).complete  # type: ignore[union-attr]


LATESTS = {
    "no UTF-8": b"\xff\xfe\x00",
    "a path": b"../elsewhere",
    "a NUL": b"step\0",
    "endless": b"a" * 5000,
    "of another": latest_text("step-00000004").replace("4", "3").encode(),
    "nothing that is there": b"step-99999999",
}


@pytest.mark.parametrize("content", LATESTS.values(), ids=LATESTS)
def test_a_latest_that_names_nothing(content: bytes, ours: Path, engine: Any, tmp_path: Path) -> None:
    (ours / "latest").write_bytes(content)
    every_reader_refuses(engine, ours, tmp_path / "out", "must hold")
    theirs = lay_out(tmp_path / "theirs", 2)
    (theirs / "latest").write_bytes(content)
    with pytest.raises(ZerodriftError, match="must h"):
        open_deepspeed(theirs)


def test_no_bit_of_latest_can_name_another(tmp_path: Path) -> None:
    text = latest_text(TAG).encode()
    for place in range(0, 8 * len(text), 3):
        data = bytearray(text)
        data[place // 8] ^= 1 << (place % 8)
        (tmp_path / "latest").write_bytes(data)
        try:
            found = read_latest(tmp_path)
        except ZerodriftError:
            continue
        assert found == TAG, data
    for plain in (TAG, f"{TAG}\n", f" {TAG}\r\n", f"{TAG}\n\n"):  # written by hand, or before
        (tmp_path / "latest").write_text(plain)
        assert read_latest(tmp_path) == TAG
    assert text.decode().strip() == TAG, "scripts for DeepSpeed strip it"


@pytest.mark.parametrize("lost", ["checkpoint.json", "latest"])
def test_a_half_copied_folder_is_not_nothing(lost: str, ours: Path, engine: Any, tmp_path: Path) -> None:
    """An interrupted copy is named; a run that began anew beside it would lose it silently."""
    (ours / TAG / "checkpoint.json").unlink()
    if lost == "latest":
        (ours / "latest").unlink()
    every_reader_refuses(engine, ours, tmp_path / "out", "copied in part")
    assert not inspect(ours).complete
    shutil.rmtree(ours / TAG)
    (ours / "latest").unlink(missing_ok=True)
    assert zd.Checkpoints(engine, ours, quiet=True).resume() is None


# --- what is nobody's to remove ---------------------------------------------------------------------------


def test_a_tag_is_a_plain_name_and_a_number_of_tags_is_kept(engine: Any, tmp_path: Path) -> None:
    checkpoints = zd.Checkpoints(engine, tmp_path, quiet=True)
    for tag in ("a" * 201, "latest", "../up", "a/b", ".hidden", "", "..", "/etc", "a\n"):
        with pytest.raises(ZerodriftError, match="`tag`: must be letters"):
            checkpoints.save(tag)
    assert list(tmp_path.iterdir()) == []
    for keep in (-1, True, 1.5):
        with pytest.raises(ZerodriftError, match="`keep`: must be a whole number of at least 0"):
            zd.Checkpoints(engine, tmp_path, keep=keep)  # type: ignore[arg-type]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def thesis(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")


def test_a_save_replaces_checkpoints_alone(engine: Any, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    checkpoints = zd.Checkpoints(engine, run, quiet=True)
    checkpoints.save("real")
    thesis(other)
    shutil.copytree(other, run / "folder")
    (run / "file").write_text("years of work")
    (run / "link").symlink_to(other)
    (run / "to-a-checkpoint").symlink_to(run / "real")
    (run / "dangling").symlink_to(tmp_path / "nowhere")
    (run / "odd").mkdir()
    (run / "odd" / "checkpoint.json").write_text("{}")
    before = snapshot(tmp_path)
    for tag in ("folder", "file", "link", "to-a-checkpoint", "dangling", "odd"):
        with pytest.raises(ZerodriftError, match="must be a checkpoint, or not exist"):
            checkpoints.save(tag)
        assert snapshot(tmp_path) == before, tag
    (run / "empty").mkdir()
    checkpoints.save("empty")
    checkpoints.save("real")
    checkpoints.load("real")
    assert (run / "link").is_symlink() and (run / "dangling").is_symlink()


def test_pruning_follows_no_link_and_takes_checkpoints_alone(engine: Any, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    elsewhere = zd.Checkpoints(engine, other, quiet=True, run="one")
    elsewhere.save("step-00000001")
    checkpoints = zd.Checkpoints(engine, run, keep=1, quiet=True, run="one")
    checkpoints.save("step-00000002")
    (run / "step-00000000").symlink_to(other / "step-00000001")
    thesis(run / "step-00000001")
    thesis(run / ".old-notes")
    (run / "step-00000003").mkdir()
    (run / "step-00000003" / "checkpoint.json").write_text("no manifest")
    (run / ".writing-draft.txt").write_text("years of work")
    (run / ".old-step-00000007@0123abcd").symlink_to(other)
    before = snapshot(tmp_path)
    checkpoints.save("step-00000005")
    checkpoints.save("step-00000006")
    after = snapshot(tmp_path)
    gone = {name for name in before if name not in after}
    assert {Path(name).parts[:2] for name in gone} == {("run", "step-00000002")}
    assert sorted(path.name for path in other.iterdir()) == ["latest", "step-00000001"]
    assert sorted(tag for tag in CheckpointFolder(run).tags() if tag > "step-00000003") == ["step-00000006"]
