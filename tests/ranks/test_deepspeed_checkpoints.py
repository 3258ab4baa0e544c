"""Checkpoints of DeepSpeed are read without it, with the bits that its own tools read, and trained on.

Damaged ones are in `tests/unit/test_deepspeed_damage.py`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zerodrift as zd
import zerodrift.deepspeed
from tests.numerics.networks import batch
from tests.ranks.harness import run_ranks
from tests.ranks.saved_by_deepspeed import BETAS, DECAY, EPS, LR, STEPS, Case, Truth, groups, model, save
from tests.unit.deepspeed_layout import lay_out
from zerodrift.api import initialize
from zerodrift.checkpoint.folder import is_deepspeed
from zerodrift.errors import CheckpointError
from zerodrift.weights.converter import convert
from zerodrift.weights.deepspeed.checkpoint import open_deepspeed

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed, which is not installed"
)

MORE = 4
CASES = [
    Case(0, "bf16", hard=False),
    Case(0, "fp16", hard=False),
    Case(1, "fp32"),
    Case(1, "bf16"),
    Case(2, "fp32"),
    Case(2, "fp32", {"round_robin_gradients": True}),
    Case(2, "bf16", {"elastic_checkpoint": True}),
    Case(3, "fp16"),
    Case(3, "fp32", {"sub_group_size": 2000}),
]
NAMELESS = Case(0, "fp32")
"""A case whose moments nobody can name, since shapes are ambiguous: groups at stage 0, in fp32."""


def near(case: Case) -> float:
    """Return the tolerance of a loss of about 4. Gradients are the same sums in another order, the norm is
    exact here and a float there, and Adam is another sequence of roundings: a few ulps (2^-22 at 4) per step
    in fp32."""
    return 2e-6 if case.dtype == "fp32" else 0.05


def save_all(folder: str) -> list[Truth]:
    return [save(case, f"{folder}/{case.name}", MORE) for case in (*CASES, NAMELESS)]


Saved = tuple[Path, dict[str, list[Truth]]]
"""A folder with one per case, and its contents by case and rank."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("deepspeed")
    ranks = run_ranks(save_all, 2, str(folder), timeout=240)
    yield folder, dict(zip((case.name for case in (*CASES, NAMELESS)), zip(*ranks, strict=True), strict=True))
    shutil.rmtree(folder)


@needs_deepspeed
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_and_moments_are_bit_for_bit_and_the_rest_is_there(saved: Saved, case: Case) -> None:
    folder, truths = saved
    truth, found = truths[case.name][0], open_deepspeed(folder / case.name)
    run = found.trained
    assert run and (run.stage, run.ranks, run.mode) == (case.stage, 2, case.dtype)
    entries = {name: entry for entry in found.entries for name in entry.names}
    assert truth.weights.keys() == entries.keys()
    for name, value in truth.weights.items():
        assert torch.equal(found.whole(entries[name]), value), name
    assert truth.moments, "nothing to compare with"
    for name, moments in truth.moments.items():
        for key, value in moments.items():
            assert torch.equal(found.whole(entries[name], key), value), (name, key)
    for name, value in truth.buffers.items():
        assert torch.equal(found.buffers[name], value)

    assert run.step == STEPS and run.samples == STEPS * 4 and run.client == {"epoch": 7, "note": "hello"}
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


@needs_deepspeed
def test_what_has_no_name_is_left_out_said_and_refused_until_allowed(saved: Saved, tmp_path: Path) -> None:
    found = open_deepspeed(saved[0] / NAMELESS.name)
    assert not any(entry.moments for entry in found.entries)
    assert "Stage 0 saves the optimizer's state without names" in found.notes[0]
    done = convert(saved[0] / NAMELESS.name, tmp_path / "ours")
    assert any("allow=('optimizer',)" in note for note in done.notes)
    engine = initialize(model(NAMELESS), None, ADAMW, device="cpu", quiet=True)
    checkpoints = zd.Checkpoints(engine, tmp_path / "ours", quiet=True)
    with pytest.raises(CheckpointError, match="optimizer"):
        checkpoints.load()
    assert checkpoints.load(allow=("optimizer",)).step == STEPS
    engine.destroy()


ADAMW = {"precision": {"mode": "fp32"}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def begun_with_zeros(case: Case) -> tuple[torch.nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    """Return a model of zeros, so that what is not loaded is seen, its optimizer, and keys of a config."""
    made = model(case)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    optimizer = torch.optim.AdamW(groups(made, case), lr=LR, betas=BETAS, eps=EPS)
    return made, optimizer, {"gradient_clipping": 1.0 if case.hard else 0.0}


def step(engine: Any, number: int) -> float:
    loss = engine(batch(number, torch.distributed.get_rank()))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


def resumed(folder: str, case: Case, stage: int) -> tuple[list[float], int, Any]:
    """Resume the converted checkpoint and train on."""
    made, optimizer, config = begun_with_zeros(case)
    config |= {"precision": {"mode": case.dtype}, "zero_optimization": {"stage": stage}}
    engine = initialize(made, optimizer, config, device="cpu", quiet=True)
    loaded = zd.Checkpoints(engine, folder, quiet=True).load()
    losses = [step(engine, number) for number in range(STEPS, STEPS + MORE)]
    engine.destroy()
    return losses, loaded.step, loaded.client


@needs_deepspeed
@pytest.mark.parametrize(("name", "stage"), [("2-fp32", 1), ("3-fp32-sub_group_size", 3), ("1-bf16", 1)])
def test_a_converted_run_goes_on_with_the_losses_of_deepspeed(
    saved: Saved, name: str, stage: int, tmp_path: Path
) -> None:
    case = next(case for case in CASES if case.name == name)
    done = convert(saved[0] / name, tmp_path / "ours")
    assert not any("moments begin at zero" in note for note in done.notes)
    ranks = run_ranks(resumed, 2, str(tmp_path / "ours"), case, stage)
    for truth, (losses, at, client) in zip(saved[1][name], ranks, strict=True):
        assert at == STEPS and client == {"epoch": 7, "note": "hello"}
        assert losses == pytest.approx(truth.losses, abs=near(case)) and losses[-1] != losses[0]


def under_the_drop_in(folder: str, case: Case, stage: int) -> dict[str, Any]:
    """Load DeepSpeed's checkpoint, train on, save beside it, and load both."""
    made, optimizer, config = begun_with_zeros(case)
    config |= {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    if case.dtype != "fp32":
        config[case.dtype] = {"enabled": True}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = {"model": made, "optimizer": optimizer, "config": config, "lr_scheduler": schedule}
    engine, *_ = zerodrift.deepspeed.initialize(**arguments)
    told: dict[str, Any] = {"loaded": engine.load_checkpoint(folder)}
    told["counts"] = engine.global_steps, engine.global_samples
    told["losses"] = [step(engine, STEPS + more) for more in range(MORE)]
    engine.save_checkpoint(folder, "later", client_state={"epoch": 8})
    after = step(engine, STEPS + MORE)
    assert engine.load_checkpoint(folder) == (str(Path(folder) / "later"), {"epoch": 8})
    assert step(engine, STEPS + MORE) == after
    back = engine.load_checkpoint(folder, f"global_step{STEPS}", load_optimizer_states=False)
    told["back"] = (back[1], step(engine, STEPS))
    engine.destroy()
    return told


@needs_deepspeed
@pytest.mark.parametrize(("name", "stage"), [("2-fp32", 3), ("1-bf16", 1)])
def test_the_drop_in_loads_what_deepspeed_saved_and_goes_on(
    saved: Saved, name: str, stage: int, tmp_path: Path
) -> None:
    case, folder = next(case for case in CASES if case.name == name), tmp_path / "run"
    shutil.copytree(saved[0] / name, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*.pt")}
    client = {"epoch": 7, "note": "hello"}
    ranks = run_ranks(under_the_drop_in, 2, str(folder), case, stage)
    for truth, told in zip(saved[1][name], ranks, strict=True):
        assert told["loaded"] == (str(folder / f"global_step{STEPS}"), client)
        assert told["counts"] == (STEPS, STEPS * 4)
        assert told["losses"] == pytest.approx(truth.losses, abs=near(case))
        assert told["back"] == (client, pytest.approx(truth.losses[0], abs=near(case)))
    assert not list(folder.rglob(".zerodrift-*")), "nothing stays beside it"
    assert {path: path.read_bytes() for path in before} == before, "and what was saved is as it was"


def versioned(version: str | None) -> Callable[[Path], None]:
    def harm(tag: Path) -> None:
        for path in tag.glob("*model*"):
            torch.save({**torch.load(path, weights_only=False), "ds_version": version}, path)

    return harm


def with_file(name: str) -> Callable[[Path], None]:
    return lambda tag: (tag / name).touch()


REFUSED: list[tuple[Callable[[Path], Any], str]] = [
    (lambda tag: [path.unlink() for path in tag.glob("*optim*")], r"_optim_states.pt of each of 2 ranks"),
    (with_file("layer_00-model_states.pt"), "a checkpoint of a DeepSpeed pipeline"),
    (with_file("zero_pp_rank_0_mp_rank_01_model_states.pt"), "a checkpoint with tensor parallelism"),
    (with_file("layer_0_expert_3_mp_rank_00_model_states.pt"), "a checkpoint with expert parallelism"),
    *((versioned(version), "must be saved by DeepSpeed 0.10 or later") for version in (None, "0.8.3")),
    (lambda tag: (tag.parent / "latest").unlink(), r"`latest` that names a tag.*`global_step3`"),
]


@pytest.mark.parametrize(("harm", "told"), REFUSED)
def test_what_cannot_be_read_is_refused_by_name(
    harm: Callable[[Path], Any], told: str, tmp_path: Path
) -> None:
    folder = lay_out(tmp_path / "run", 3)
    assert is_deepspeed(folder) and is_deepspeed(folder / "global_step3") and not is_deepspeed(tmp_path)
    with pytest.raises(CheckpointError, match=r"tag 'global_step4'.*Did you mean `global_step3`"):
        open_deepspeed(folder, "global_step4")
    versioned("0.21.0")(folder / "global_step3")
    assert "newer than the tested versions" in open_deepspeed(folder).notes[0]
    harm(folder / "global_step3")
    with pytest.raises(CheckpointError, match=told):
        open_deepspeed(folder)
