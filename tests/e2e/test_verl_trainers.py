"""verl's SFT trainer and its workers, unmodified, drive the engine on two CPU ranks.

Each runs with zerodrift once and with verl's own fsdp2 once, in fp32. The trainer finds the engine by its
entry point, the workers by VERL_USE_EXTERNAL_MODULES.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

for name in ("verl", "fastapi", "uvicorn"):  # its workers import these, and it does not ask for them
    pytest.importorskip(name, reason=f"{name} is not installed")

ROOT = Path(__file__).parents[2]
DOORS = ROOT / "tests" / "doors"
NEAR = 1e-6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(folder: Path, *words: object, **environment: str) -> str:
    paths = os.pathsep.join([str(DOORS / "on_cpu"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **fixed, **environment},
        cwd=folder, capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


# --- the SFT trainer ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pandas = pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("data")
    run(folder, DOORS / "tiny.py", folder)
    rows = [json.loads(line) for line in (folder / "chats" / "train.jsonl").read_text().splitlines()]
    pandas.DataFrame(rows).to_parquet(folder / "chats.parquet")
    return folder


def run_trainer(data: Path, out: Path, steps: int, *words: str) -> list[dict[str, float]]:
    """Run the trainer and return its log of each step and evaluation."""
    out.mkdir(exist_ok=True)
    said = [
        f"data.train_files={data}/chats.parquet",
        f"data.val_files={data}/chats.parquet",
        "data.train_batch_size=8",
        "data.micro_batch_size_per_gpu=2",
        "data.max_token_len_per_gpu=64",
        "data.num_workers=0",
        "data.max_length=64",
        "data.ignore_input_ids_mismatch=true",
        f"model.path={data}/model",
        "+model.override_config.attn_implementation=sdpa",
        "optim.lr_scheduler_type=cosine",
        "trainer.logger=[file]",
        "trainer.total_epochs=1",
        f"trainer.total_training_steps={steps}",
        "trainer.test_freq=2",
        "trainer.save_freq=2",
        f"trainer.default_local_dir={out}/saved",
        "trainer.device=cpu",
    ]
    log = out / "log.jsonl"
    external = {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu", "VERL_ENGINE_DEVICE": "cuda"}
    command = (*TORCHRUN, "-m", "verl.trainer.sft_trainer", *said, *words)
    run(out, *command, VERL_FILE_LOGGER_PATH=str(log), **external)
    told = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    names = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
    return [{name: one[name] for name in names if name in one} for one in told]


FP32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
FSDP2 = ("engine.strategy=fsdp2", f"+engine.mixed_precision={FP32}", "engine.use_torch_compile=false")
OURS = ("engine=zerodrift", "engine.dtype=float32")


def test_the_sft_trainer_has_the_losses_of_fsdp2(data: Path, tmp_path: Path) -> None:
    ours = run_trainer(data, tmp_path / "ours", 4, *OURS, "engine.config={zero_optimization: {stage: 3}}")
    theirs = run_trainer(data, tmp_path / "theirs", 4, *FSDP2)
    assert len(ours) == len(theirs) == 6, "four steps, two evaluations"
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=NEAR)


def test_the_sft_trainer_goes_on_where_it_was_stopped(data: Path, tmp_path: Path) -> None:
    bf16 = ("engine=zerodrift", "engine.dtype=bfloat16")
    stage = "engine.config={{zero_optimization: {{stage: {}}}}}"
    whole = run_trainer(data, tmp_path / "whole", 4, *bf16, stage.format(2))
    saved = tmp_path / "whole" / "saved"
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    (tmp_path / "whole" / "log.jsonl").unlink()
    rest = run_trainer(data, tmp_path / "whole", 4, *bf16, stage.format(3))
    assert len(rest) == 3
    for mine, other in zip(rest, whole[3:], strict=True):
        assert mine == pytest.approx(other, rel=NEAR)


# --- the workers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("workers")
    run(folder, *TORCHRUN, Path(__file__).with_name("verl_worker.py"), folder)
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


def test_sft_is_that_of_fsdp2_packed_and_padded(results: dict[str, Any]) -> None:
    for how, steps in results["sft"]["zerodrift"].items():
        for mine, other in zip(steps, results["sft"]["fsdp2"][how], strict=True):
            assert mine == pytest.approx(other, rel=NEAR), how


def test_a_batch_passed_twice_is_added_at_stage_3_and_refused_at_stage_1(results: dict[str, Any]) -> None:
    once, added, _, said = results["twice"]
    assert added == pytest.approx(2 * once, rel=NEAR)
    assert "must be followed by `optimizer_step`" in said


def test_a_policy_is_that_of_fsdp2(results: dict[str, Any]) -> None:
    ours, theirs = results["ppo"]["zerodrift"], results["ppo"]["fsdp2"]
    assert ours["entropy"] == pytest.approx(theirs["entropy"], rel=NEAR)
    for mine, other in zip(ours["steps"], theirs["steps"], strict=True):
        assert mine == pytest.approx(other, rel=NEAR, abs=NEAR)
    first = ours["steps"][0]
    assert first["actor/ppo_kl"] == first["actor/pg_clipfrac"] == 0, "nothing has changed"


def test_log_probabilities_before_training_are_those_in_training(results: dict[str, Any]) -> None:
    for how, (kinds, same) in results["bits"].items():
        assert kinds == ["torch.float32"] and same == [True, True], how


def test_a_critic_is_that_of_plain_torch(results: dict[str, Any]) -> None:
    for mine, other in zip(results["critic"]["zerodrift"], results["critic"]["plain"], strict=True):
        assert {name: mine[name] for name in other} == pytest.approx(other, rel=NEAR)


def test_an_adapter_trains_and_is_switched_off(results: dict[str, Any]) -> None:
    found = results["adapter"]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["without"] and not found["with"]
    assert len(found["names"]) == 8 and not any("default" in name for name in found["names"])


def test_a_sampler_gets_the_names_and_dtypes_of_a_file(results: dict[str, Any]) -> None:
    found = results["sampler"]
    assert found["names"] == [] and found["kinds"] == ["torch.float32", "torch.bfloat16"]
    assert "must be read to its end before weights change" in found["said"]


def test_checkpoints_hold_what_is_asked_for(results: dict[str, Any]) -> None:
    found = results["places"]
    assert found["exported"], "a saved model and a sampler have the same bits"
    assert found["resumed"] == pytest.approx(found["straight"], rel=NEAR)
    assert found["kept"] == ["global_step_2", "global_step_3"]
    assert found["alone"] == ["huggingface"] and "model.safetensors" in found["files"]
    there, back = found["parts"]
    assert there == back
    adapter, whole = found["bytes"]
    assert adapter < whole / 3
