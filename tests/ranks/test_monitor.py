"""Curves of a config are those that DeepSpeed 0.19.6 writes, by rank 0, with errors before training."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks.harness import on_ranks, run_ranks
from zerodrift import deepspeed
from zerodrift.deepspeed.monitor.config import get_monitor_config
from zerodrift.deepspeed.monitor.monitor import MonitorMaster
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import ConfigError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}},
}


def csv_block(folder: str) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def curves(folder: str) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(Path(folder, "job").glob("*.csv"))}


def engine_of(**keys: Any) -> Any:
    torch.manual_seed(1)
    return deepspeed.initialize(model=nn.Linear(4, 1), config={**CONFIG, **keys})[0]


def steps(engine: Any, count: int) -> list[float]:
    losses = []
    for index in range(2 * count):
        loss = engine(torch.full((2, 4), 1.0 + index, dtype=engine.module.weight.dtype)).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_engine(folder: str, stage: int) -> tuple[bool, list[float], list[float]]:
    engine = engine_of(zero_optimization={"stage": stage}, **csv_block(folder))
    losses = steps(engine, 3)
    engine.monitor.write_events([("Own/a name", 3, 1)])
    return engine.monitor.enabled, losses, engine.get_lr()


@pytest.mark.parametrize("stage", [0, 3])
def test_curves_are_of_all_samples_and_written_once(tmp_path: Path, stage: int) -> None:
    (enabled, losses, rate), _ = run_ranks(train_engine, 2, str(tmp_path), stage)
    found = curves(str(tmp_path))
    assert enabled and list(found) == [
        "Own_a_name.csv",
        "Train_Samples_lr.csv",
        "Train_Samples_train_loss.csv",
    ]
    assert found["Own_a_name.csv"] == ["step,a name", "1,3"]
    head, *rates = found["Train_Samples_lr.csv"]
    assert head == "step,lr" and [row.split(",")[0] for row in rates] == ["8", "16", "24"]
    assert float(rates[-1].split(",")[1]) == rate[0]
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    assert found["Train_Samples_train_loss.csv"] == [
        "step,train_loss",
        *(f"{8 * number},{mean}" for number, mean in enumerate(means, 1)),
    ]


@on_ranks(1)
def test_a_second_run_adds_to_the_files_and_training_goes_on_without(tmp_path: Path) -> None:
    said: list[str] = []
    folder = str(tmp_path / "curves")
    for _ in range(2):
        engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4}, **csv_block(folder))
        steps(engine, 1)
        engine.destroy()
    assert curves(folder)["Train_Samples_loss_scale.csv"][:2] == ["step,loss_scale", "4,16.0"]
    rows = curves(folder)["Train_Samples_lr.csv"]
    assert [row.split(",")[0] for row in rows] == ["step", "4", "4"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
        engine = engine_of(**csv_block(folder))
        steps(engine, 1)
        shutil.rmtree(folder)
        steps(engine, 2)
    assert engine.global_steps == 3
    (line,) = [each for each in said if "csvMonitor" in each]
    assert "nothing more is written" in line and "lr.csv" in line


def test_without_a_process_group_curves_are_written_too(tmp_path: Path) -> None:
    alone = MonitorMaster(get_monitor_config(csv_block(str(tmp_path))))
    alone.write_events([("Train/Samples/lr", 0.5, 8)])
    assert curves(str(tmp_path)) == {"Train_Samples_lr.csv": ["step,lr", "8,0.5"]}


CSV, WANDB = "csv_monitor", {"wandb": {"enabled": True}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({CSV: {"enable": True}}, "csv_monitor.enable"),
    ({CSV: {"enabled": "often"}}, "csv_monitor.enabled"),
    ({CSV: True}, "csv_monitor"),
    ({CSV: {"enabled": True, "output_path": "/dev/null"}}, "csv_monitor.output_path"),
    *([] if find_spec("wandb") else [(WANDB, "pip install wandb")]),
]


@on_ranks(1)
def test_what_cannot_be_written_is_an_error_before_training() -> None:
    assert not get_monitor_config({"csv_monitor": {"enabled": False}, "tensorboard": None}).enabled
    for block, words in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(words)):
            engine_of(**block)


@on_ranks(2)
def test_what_rank_0_cannot_begin_is_an_error_of_all(tmp_path: Path) -> None:
    if torch.distributed.get_rank() == 0:
        (tmp_path / "wandb.py").write_text("def init(**options):\n    raise PermissionError('no key')\n")
    torch.distributed.barrier()
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ConfigError, match=r"wandb\.enabled[\s\S]*PermissionError: no key"):
        engine_of(**WANDB)


WANDB_MODULE = """
import json, pathlib

class Run:
    def __init__(self, **options):
        self.told = [options]
    def log(self, data, step=None, commit=None):
        self.told.append([data, step])
        pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(self.told))

def init(**options):
    return Run(**options)
"""


def trained_with_wandb(folder: str) -> float:
    sys.path.insert(0, folder)
    engine = engine_of(wandb={"enabled": True, "project": "mine", "team": "ours"})
    steps(engine, 1)
    return float(engine.get_lr()[0])


def test_a_run_of_wandb_gets_them_from_rank_0(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB_MODULE)
    rate, _ = run_ranks(trained_with_wandb, 2, str(tmp_path))
    options, first, second = json.loads((tmp_path / "wandb.json").read_text())
    assert options == {"project": "mine", "group": None, "entity": "ours"}
    assert first == [{"Train/Samples/lr": rate}, 8] and list(second[0]) == ["Train/Samples/train_loss"]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
@on_ranks(1)
def test_tensorboard_reads_them(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps(engine_of(tensorboard={"enabled": True, "output_path": str(tmp_path)}), 2)
    found = EventAccumulator(str(tmp_path / "DeepSpeedJobName"))
    found.Reload()
    assert [event.step for event in found.Scalars("Train/Samples/lr")] == [4, 8]
