"""Files of the drop-in: checkpoints in part and at another stage, state dicts, DeepSpeed 0.19.6's curves."""

from __future__ import annotations

import copy
import json
import re
import shutil
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import zerodrift.deepspeed as deepspeed
from tests.habits.networks import WIDTH, Seeded
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_dropin import make, train
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import CheckpointError, ConfigError, ModelError, UnsupportedError


@on_ranks(2)
def test_tags_that_differ_between_ranks(tmp_path: Path) -> None:
    folder, tag = str(tmp_path), f"tag{deepspeed.comm.get_rank()}"
    with pytest.raises(AssertionError, match="the same on all ranks; got 'tag0', 'tag1'"):
        make(1, checkpoint={"tag_validation": "FAIL"}).save_checkpoint(folder, tag=tag)
    engine = make(1, checkpoint={"tag_validation": "Warn"})
    engine.save_checkpoint(folder, tag=tag)
    assert engine.load_checkpoint(folder)[0] == str(Path(folder) / "tag0")


@on_ranks(2)
def test_checkpoints_load_at_another_stage_and_in_part(tmp_path: Path) -> None:
    folder, rank, half = str(tmp_path), deepspeed.comm.get_rank(), {"bf16": {"enabled": True}}
    half["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}
    engine = make(3, **half)
    train(engine, 2)
    engine.save_checkpoint(folder, client_state={"rank": rank})
    goes_on = train(engine, 2, first=2)
    engine = make(1, **half)
    assert engine.load_checkpoint(folder) == (str(tmp_path / "global_step2"), {"rank": 0})
    assert train(engine, 2, first=2) == goes_on
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (4, 4, 32)
    engine = make(1, **half)
    rates = engine.optimizer.param_groups[0]["lr"], engine.lr_scheduler.last_batch_iteration
    weights = engine.load_checkpoint(folder, tag="global_step2", load_optimizer_states=False)
    assert weights[1] == {"rank": 0} and engine.global_steps == 2
    loaded = engine.optimizer.param_groups[0]["lr"], engine.lr_scheduler.last_batch_iteration
    assert loaded[0] == rates[0] and loaded[1] == rates[1] + 2, "as in DeepSpeed, until its next step"
    head = engine.module.head.weight
    assert deepspeed.utils.safe_get_full_optimizer_state(head, "exp_avg") is None
    engine = make(1, **half)
    engine.load_checkpoint(folder, load_module_only=True)
    assert engine.global_steps == 0
    with pytest.raises(CheckpointError, match="'global_step9'"):
        engine.load_checkpoint(folder, tag="global_step9")
    with pytest.raises(UnsupportedError, match="custom_load_fn"):
        engine.load_checkpoint(folder, custom_load_fn=print)
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    assert (consolidated is None) is (rank == 1)
    if rank == 0:
        masters = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
        assert masters.keys() == consolidated.keys() == engine.module.state_dict().keys()
        for name, value in consolidated.items():
            assert torch.equal(masters[name].to(value.dtype), value), name


def frozen_in_part(stage: int, seed: float | None = None) -> Any:
    """Make an engine with a frozen block, whose values begin with a number if there is one."""
    net = Seeded()
    net.blocks[0].requires_grad_(False)
    for parameter in net.parameters() if seed is not None else ():
        nn.init.constant_(parameter, seed)
    return make(stage, net, bf16={"enabled": True})


@on_ranks(2)
def test_frozen_parameters_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    root = str(tmp_path)
    engine = frozen_in_part(3)
    frozen = [name for name, p in engine.module.named_parameters() if not p.requires_grad]
    train(engine, 1)
    engine.save_checkpoint(root, "lean", exclude_frozen_parameters=True)
    engine.save_checkpoint(root, "whole", save_latest=False)
    expected = train(engine, 2, first=1)
    masters = {name: engine.running.parameter(name).master for name in frozen}
    with pytest.raises(CheckpointError, match=r"must hold every parameter of the model.*blocks.0.up.weight"):
        engine.load_checkpoint(root, "lean")
    path, _ = engine.load_checkpoint(root, "lean", load_module_strict=False)
    assert path == str(tmp_path / "lean") and train(engine, 2, first=1) == expected
    engine.load_checkpoint(root, "whole")
    assert train(engine, 2, first=1) == expected

    other = frozen_in_part(2, 0.5)
    other.load_checkpoint(root, "lean", load_module_strict=False)
    for name in frozen:
        assert (other.running.parameter(name).master == 0.5).all(), "left as it was"
    with other.running.gathered(write=True) as values:
        for name in frozen:
            values[name].copy_(masters[name])
    assert train(other, 2, first=1) == pytest.approx(expected, abs=2e-2)
    lean, whole = (
        sum(f.stat().st_size for f in (tmp_path / tag).glob("*.distcp")) for tag in ("lean", "whole")
    )
    assert whole - lean > 4 * WIDTH * WIDTH * 2


def headed(name: str, width: int = 1) -> nn.Module:
    torch.manual_seed(len(name))
    return nn.Sequential(OrderedDict({"body": nn.Linear(WIDTH, WIDTH), name: nn.Linear(WIDTH, width)}))


@on_ranks(2)
def test_a_model_with_another_head(tmp_path: Path) -> None:
    root = str(tmp_path)
    engine = make(2, headed("old"))
    train(engine, 1)
    engine.save_checkpoint(root)
    trained = engine.running.parameter("body.weight")
    body, moment = trained.master, trained.state["exp_avg"]

    engine = make(2, headed("fresh"))
    loaded, own = (engine.running.parameter(name) for name in ("body.weight", "fresh.weight"))
    fresh = own.master
    with pytest.raises(CheckpointError, match=r"`fresh.weight`"):
        engine.load_checkpoint(root)
    assert not torch.equal(loaded.master, body)
    engine.load_checkpoint(root, load_module_strict=False)
    assert torch.equal(loaded.master, body) and torch.equal(loaded.state["exp_avg"], moment)
    assert torch.equal(own.master, fresh) and not own.state["exp_avg"].any()
    train(engine, 1)
    assert not torch.equal(own.master, fresh)

    engine = make(2, headed("old", width=3))
    with pytest.raises(CheckpointError, match=r"`old.weight`: must have shape \[3, 8\]"):
        engine.load_checkpoint(root, load_module_strict=False)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_memory_that_is_assigned_is_named_where_values_are_saved(stage: int) -> None:
    """A trained parameter's, whose former memory a script keeps; a frozen one's is taken over."""
    net = Seeded()
    net.blocks[0].requires_grad_(False)
    engine = make(stage, net)
    net.blocks[0].down.bias.data = torch.full((WIDTH,), 0.5)
    assert torch.equal(engine.module_state_dict()["blocks.0.down.bias"], torch.full((WIDTH,), 0.5))
    held = net.head.weight.data
    net.head.weight.data = torch.zeros_like(held)
    with pytest.raises(ModelError, match=r"`head.weight`: must have its own memory.*assign the old `.data`"):
        engine.module_state_dict()
    net.head.weight.data = held
    assert torch.equal(engine.module_state_dict()["head.weight"], held)


class Renames(Seeded):
    """A model whose `state_dict` renames keys and leaves one out, as TRL's with a value head."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        return {
            name.replace("blocks.", "layers."): value for name, value in state.items() if "into" not in name
        }


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_state_dict_of_the_models_own(stage: int) -> None:
    """A `state_dict` is whole and has the model's keys; files of stage 3 have the names of modules, as
    with DeepSpeed."""
    net = Renames()
    net.head.requires_grad_(False)
    engine = make(stage, net)
    train(engine, 1)
    with deepspeed.zero.GatheredParameters(list(net.parameters())):
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}
        own = {name: value.clone() for name, value in net.state_dict().items()}
    assert own.keys() != whole.keys()
    for frozen in (False, True):
        expected = [
            {name: value for name, value in state.items() if not (frozen and "head" in name)}
            for state in (own, whole if stage == 3 else own)
        ]
        state = engine.module_state_dict(exclude_frozen_parameters=frozen)
        saved = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=frozen)
        assert (saved is None) == (engine.global_rank > 0)
        for found, wanted in zip((state, saved), expected, strict=True):
            if found is not None:
                assert list(found) == list(wanted)
                assert all(torch.equal(found[name], value) for name, value in wanted.items())


@on_ranks(2)
def test_what_a_state_dict_takes_between_uses_has_no_values(tmp_path: Path) -> None:
    """Use a state dict on a rank that saves nothing as the saving rank does; no number comes of it."""
    net = Seeded()
    shapes = {name: (value.shape, value.dtype) for name, value in net.state_dict().items()}
    module, name = make(3, net).module, "head.bias"
    entries = module.state_dict()
    assert {n: (v.shape, v.dtype) for n, v in entries.items()} == shapes
    value = entries[name]
    assert value.cpu().clone().half().view(2, 4)[1].shape == (4,) and copy.deepcopy(entries).keys()
    assert torch.stack([value, torch.zeros(8)]).dtype == torch.float32
    file = tmp_path / str(deepspeed.comm.get_rank())
    there, plain = torch.zeros(8), nn.Parameter(torch.zeros(8))
    asked = {
        "item": lambda: value.sum().item(),
        "__bool__": lambda: bool(value[0] == value[0]),
        "copy_": lambda: there.copy_(value),
        "__setitem__": lambda: there.__setitem__(0, value[0]),
        "pickle": lambda: torch.save(entries, file),
        "is_contiguous": lambda: save_file({name: value}, file),
        "clone": lambda: module.get_parameter(name).clone(),
    }
    for what, ask in asked.items():
        with pytest.raises(ModelError, match=rf"`{name}`.*got `{what}`|`pickle` of") as error:
            ask()
        assert "zero.GatheredParameters" in str(error.value)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        plain.data = value
    assert not plain.any() and not there.any()


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}}


def csv_block(folder: str) -> dict[str, Any]:
    return {"csv_monitor": {"enabled": True, "output_path": folder, "job_name": "job"}}


def curves(folder: str) -> dict[str, list[str]]:
    return {path.name: path.read_text().splitlines() for path in sorted(Path(folder, "job").glob("*.csv"))}


def engine_of(stage: int = 0, **keys: Any) -> Any:
    return make(stage, gradient_accumulation_steps=2, scheduler=WARMUP, **keys)


def write_curves(folder: str, stage: int) -> tuple[list[float], float]:
    engine = engine_of(stage, **csv_block(folder))
    losses = train(engine, 6)
    engine.monitor.write_events([("Own/a name", 3, 1)])
    return losses, engine.get_lr()[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_curves_are_of_all_samples_and_written_once(tmp_path: Path, stage: int) -> None:
    (losses, rate), _ = run_ranks(write_curves, 2, str(tmp_path), stage)
    found = curves(str(tmp_path))
    assert found.pop("Own_a_name.csv") == ["step,a name", "1,3"]
    head, *rates = found.pop("Train_Samples_lr.csv")
    assert head == "step,lr" and [row.split(",")[0] for row in rates] == ["16", "32", "48"]
    assert float(rates[-1].split(",")[1]) == rate
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    curve = ["step,train_loss", *(f"{16 * number},{mean}" for number, mean in enumerate(means, 1))]
    assert found == {"Train_Samples_train_loss.csv": curve}


@on_ranks(1)
def test_a_second_run_adds_to_the_files_and_training_goes_on_without(tmp_path: Path) -> None:
    folder = str(tmp_path / "curves")
    for _ in range(2):
        engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4}, **csv_block(folder))
        train(engine, 2)
    found = curves(folder)
    assert found["Train_Samples_loss_scale.csv"][:2] == ["step,loss_scale", "8,16.0"]
    assert [row.split(",")[0] for row in found["Train_Samples_lr.csv"]] == ["step", "8", "8"]
    shutil.rmtree(folder)
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr(logger, "warning", lambda text, *values: said.append(text % values))
        train(engine, 4)
    assert engine.global_steps == 3
    (line,) = [each for each in said if "csvMonitor" in each]
    assert "is switched off" in line and "lr.csv" in line


REFUSED: list[tuple[Any, str]] = [
    ({"enable": True}, "csv_monitor.enable"),
    ({"enabled": "often"}, "csv_monitor.enabled"),
    ({"enabled": True, "output_path": "/dev/null"}, "csv_monitor.output_path"),
]


@on_ranks(2)
def test_what_cannot_be_written_is_an_error_of_all_before_training(tmp_path: Path) -> None:
    """A block that is wrong, and a module that only rank 0 uses, and cannot begin."""
    for block, words in REFUSED:
        with pytest.raises(ConfigError, match=re.escape(words)):
            engine_of(csv_monitor=block)
    if torch.distributed.get_rank() == 0:
        (tmp_path / "wandb.py").write_text("def init(**options):\n    raise PermissionError('no key')\n")
    torch.distributed.barrier()
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(ConfigError, match=r"wandb\.enabled[\s\S]*PermissionError: no key"):
        engine_of(wandb={"enabled": True})


WANDB_MODULE = """
import json, pathlib

class Run(list):
    def log(self, data, step=None, commit=None):
        self.append([data, step])
        pathlib.Path(__file__).with_suffix(".json").write_text(json.dumps(self))

def init(**options):
    return Run([options])
"""


def trained_with_wandb(folder: str) -> float:
    sys.path.insert(0, folder)
    engine = engine_of(wandb={"enabled": True, "project": "mine", "team": "ours"})
    train(engine, 2)
    return float(engine.get_lr()[0])


def test_a_run_of_wandb_gets_them_from_rank_0(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(WANDB_MODULE)
    rate, _ = run_ranks(trained_with_wandb, 2, str(tmp_path))
    options, first, second = json.loads((tmp_path / "wandb.json").read_text())
    assert options == {"project": "mine", "group": None, "entity": "ours"}
    assert first == [{"Train/Samples/lr": rate}, 16] and list(second[0]) == ["Train/Samples/train_loss"]
