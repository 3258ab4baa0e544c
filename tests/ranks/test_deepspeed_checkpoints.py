"""Checkpoints of DeepSpeed are read without it, with the bits that its own tools read."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.ranks.harness import run_ranks
from tests.ranks.saved_by_deepspeed import BETAS, DECAY, LR, STEPS, Case, Truth, save
from zerodrift.checkpoint.folder import is_deepspeed
from zerodrift.errors import CheckpointError
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)

CASES = [
    Case(0, "fp32", hard=False),
    Case(0, "bf16", hard=False),
    Case(0, "bf16"),
    Case(0, "fp16", hard=False),
    Case(1, "fp32"),
    Case(1, "bf16"),
    Case(1, "fp16"),
    Case(2, "bf16"),
    Case(2, "fp32", {"round_robin_gradients": True}),
    Case(2, "bf16", {"elastic_checkpoint": True}),
    Case(3, "bf16"),
    Case(3, "fp16"),
    Case(3, "fp32", {"sub_group_size": 2000}),
]
NAMES = [case.name for case in CASES]


def save_all(folder: str) -> list[Truth]:
    return [save(case, f"{folder}/{case.name}") for case in CASES]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Truth]]]:
    """Save a folder per case, and return its contents."""
    folder = tmp_path_factory.mktemp("deepspeed")
    truths = run_ranks(save_all, 2, str(folder), timeout=240)[0]
    yield folder, dict(zip(NAMES, truths, strict=True))
    shutil.rmtree(folder)


Saved = tuple[Path, dict[str, Truth]]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_weights_and_moments_are_bit_for_bit(saved: Saved, case: Case) -> None:
    folder, truths = saved
    truth, found = truths[case.name], open_deepspeed(folder / case.name)
    run = found.trained
    assert run and (run.stage, run.ranks, run.mode) == (case.stage, 2, case.dtype)
    assert truth.weights.keys() == {name for entry in found.entries for name in entry.names}
    for name, value in truth.weights.items():
        assert torch.equal(found.whole(name), value), name
    assert truth.moments, "nothing to compare with"
    for name, moments in truth.moments.items():
        for key, value in moments.items():
            assert torch.equal(found.whole(name, key), value), (name, key)
    for name, value in truth.buffers.items():
        assert torch.equal(found.buffers[name], value)


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_rest_of_the_run(saved: Saved, case: Case) -> None:
    found = open_deepspeed(saved[0] / case.name)
    run = found.trained
    assert run and run.step == STEPS and run.samples == STEPS * 4
    assert run.client == {"epoch": 7, "note": "hello"}
    # FP16_Optimizer of stage 0 takes a step of zeros when it is made, and Adam counts it.
    assert run.updates == STEPS + (case.stage == 0 and case.dtype != "fp32")
    assert run.scaler == ({"scale": 256.0, "left": 2, "good": STEPS} if case.dtype == "fp16" else None)
    trained = {entry.name: entry for entry in found.entries if entry.group >= 0}
    if case.hard:
        assert "layers.0.norm1.weight" not in trained
        assert all(entry.group == int(len(entry.shape) <= 1) for entry in trained.values())
    for group in filter(None, run.groups[:1]):  # an elastic checkpoint has no options
        assert (group["lr"], tuple(group["betas"]), group["weight_decay"]) == (LR, BETAS, DECAY)
    assert next(entry.name for entry in found.entries if "head.weight" in entry.names) == "embed.weight"


def test_nothing_is_read_before_it_is_used(saved: Saved) -> None:
    """Values are views of the mapped files, not copies."""
    found = open_deepspeed(saved[0] / "1-bf16")
    trained = [entry for entry in found.entries if entry.group >= 0]
    storages = {run.untyped_storage().data_ptr() for entry in trained for _, run in found.weight(entry)}
    assert len(storages) <= 4, "one buffer per rank and group"


def test_what_has_no_name_is_left_out_and_said(saved: Saved, tmp_path: Path) -> None:
    """Shapes are ambiguous at stage 0 in fp32 with several groups and frozen parameters."""
    run_ranks(save, 2, Case(0, "fp32"), str(tmp_path), timeout=90)
    found = open_deepspeed(tmp_path)
    assert not any(entry.moments for entry in found.entries)
    assert "Stage 0 saves the optimizer's state without names" in found.notes[0]


# --- bad input --------------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    shutil.copytree(saved[0] / "3-bf16", tmp_path / "run")
    return tmp_path / "run"


def one(folder: Path, pattern: str) -> Path:
    return next(iter(sorted((folder / f"global_step{STEPS}").glob(pattern))))


def test_a_folder_is_recognised(copy: Path) -> None:
    assert is_deepspeed(copy) and is_deepspeed(copy / f"global_step{STEPS}")
    assert not is_deepspeed(copy.parent)


def test_a_missing_rank(copy: Path) -> None:
    one(copy, "*rank_1_*optim*").unlink()
    one(copy, "*rank_1_*model*").unlink()
    with pytest.raises(
        CheckpointError, match=r"2 problems[\s\S]*_optim_states.pt of each of 2 ranks[\s\S]*`1`"
    ):
        open_deepspeed(copy)


def test_a_missing_optimizer(copy: Path) -> None:
    for path in (copy / f"global_step{STEPS}").glob("*optim*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"must hold a file .*_optim_states.pt of each of 2 ranks"):
        open_deepspeed(copy)


def test_a_truncated_file(copy: Path) -> None:
    path = one(copy, "*rank_1_*optim*")
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"rank_1_.*must be readable.*cut short or damaged"):
        open_deepspeed(copy)


def test_files_of_another_save(saved: Saved, tmp_path: Path) -> None:
    """Files of the same run, one step apart, have the right sizes and other values."""
    shutil.copytree(saved[0] / "1-bf16", tmp_path / "run")
    path = one(tmp_path / "run", "*rank_1_*optim*")
    state = torch.load(path, weights_only=False)
    for flat in state["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
        flat.detach().add_(1.0)
    torch.save(state, path)
    with pytest.raises(CheckpointError, match=r"must have masters of .* that round to its weights"):
        open_deepspeed(tmp_path / "run")


def test_no_such_tag(copy: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tag 'global_step4'.*Did you mean `global_step3`"):
        open_deepspeed(copy, "global_step4")
    (copy / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"`latest` that names a tag.*`global_step3`"):
        open_deepspeed(copy)


def test_code_in_a_file_is_not_run(copy: Path, tmp_path: Path) -> None:
    path = one(copy, "*rank_0_*model*")
    state = torch.load(path, weights_only=False)
    torch.save({**state, "surprise": Surprise(str(tmp_path / "ran"))}, path)
    with pytest.raises(CheckpointError, match=r"an object of `.*`, which only its own code can read"):
        open_deepspeed(copy)
    assert not (tmp_path / "ran").exists()
    assert open_deepspeed(copy, trust=True).trained.client["surprise"] is None  # type: ignore[union-attr]
    assert (tmp_path / "ran").exists()


class Surprise:
    """An object that runs code when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return touch, (self.path,)


def touch(path: str) -> None:
    Path(path).touch()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_00-model_states.pt", "a checkpoint of a DeepSpeed pipeline"),
        ("zero_pp_rank_0_mp_rank_01_model_states.pt", "a checkpoint with tensor parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "a checkpoint with expert parallelism"),
    ],
)
def test_other_kinds_are_refused_by_name(copy: Path, name: str, what: str) -> None:
    (copy / f"global_step{STEPS}" / name).touch()
    with pytest.raises(CheckpointError, match=what):
        open_deepspeed(copy)


@pytest.mark.parametrize("version", [None, "0.8.3", "soon"])
def test_an_unknown_version(copy: Path, version: str | None) -> None:
    path = one(copy, "*rank_0_*model*")
    state = torch.load(path, weights_only=False)
    torch.save({**state, "ds_version": version}, path)
    with pytest.raises(CheckpointError, match=r"must be saved by DeepSpeed 0.10 or later"):
        open_deepspeed(copy)


def test_a_newer_version_is_said(copy: Path) -> None:
    for path in (copy / f"global_step{STEPS}").glob("*model*"):
        state = torch.load(path, weights_only=False)
        torch.save({**state, "ds_version": "0.21.0"}, path)
    assert "newer than what this was tried with" in open_deepspeed(copy).notes[0]
