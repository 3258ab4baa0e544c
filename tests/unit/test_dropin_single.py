"""The drop-in in one process: arguments, results and refusals of `initialize`."""

from __future__ import annotations

import argparse
import base64
import contextlib
import copy
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerodrift.deepspeed as deepspeed
from zerodrift.deepspeed.modules import NotHereError
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.utils import zero_to_fp32
from zerodrift.dtypes import DType
from zerodrift.errors import CheckpointError, ConfigError, MeshError, UnsupportedError

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 2},
}

BF16 = {**CONFIG, "bf16": {"enabled": True}}

BARE = {key: value for key, value in CONFIG.items() if key != "optimizer"}


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make(config: Any = None, **rest: Any) -> Any:
    return deepspeed.initialize(model=rest.pop("model", None) or model(), config=config or CONFIG, **rest)


def step(engine: Any) -> float:
    loss = engine(torch.ones(2, 4)).float().square().mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def masters(engine: Any) -> dict[str, torch.Tensor]:
    read = deepspeed.utils.safe_get_full_fp32_param
    return {name: read(parameter) for name, parameter in engine.module.named_parameters()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def changed(engine: Any) -> set[str]:
    """Return the names of the parameters that a step changes."""
    before = {name: value.clone() for name, value in engine.module_state_dict().items()}
    step(engine)
    return {
        name for name, value in engine.module_state_dict().items() if not torch.equal(value, before[name])
    }


# --- the ways in ------------------------------------------------------------------------------------------


def test_a_process_that_nobody_launched_is_a_world_of_one() -> None:
    engine, optimizer, loader, schedule = make()
    assert isinstance(engine, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
    assert loader is None and schedule is None and len(list(make(training_data=DATA)[2])) == 5
    assert deepspeed.comm.get_rank() == 0 and deepspeed.comm.get_world_size() == 1
    assert torch.distributed.get_world_size() == 1 and deepspeed.comm.get_local_rank() == 0
    assert step(engine) > step(engine)


def test_the_keys_of_zero_plus_plus_decide() -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    zero["zero_hpz_partition_size"] = 8
    engine = deepspeed.initialize(model=model(), config={**CONFIG, "zero_optimization": zero})[0]
    assert engine.zero_quantized_weights() and engine.zero_quantized_gradients()
    assert not engine.zero_quantized_nontrainable_weights()
    assert engine.zero_hpz_partition_size() == 8
    cells = [row.columns.cells() for row in engine.running.plan.rows if len(row.shape) > 1]
    assert {(cell["gather"], cell["reduce"]) for cell in cells} == {("int8-256", "int4-128>fp32")}
    assert engine.communication_data_type is torch.float32
    assert step(engine) > step(engine)
    engine.destroy()


def test_the_config_comes_by_any_one_way(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    coded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    ways = [{"config": written} for written in (str(file), file, coded)]
    for way in (*ways, {"config_params": CONFIG}, {"args": args}):
        engine = deepspeed.initialize(model=model(), **way)[0]
        assert engine.zero_optimization_stage() == 2 and engine.config == CONFIG
        engine.destroy()
    assert args.local_rank == 0 and args.deepspeed
    with pytest.raises(ConfigError, match=r"args.deepspeed_config"):
        deepspeed.initialize(args=args, model=model(), config=CONFIG)


FUSED = deepspeed.ops.adam.FusedAdam
MPU = SimpleNamespace(get_model_parallel_world_size=lambda: 2)
DATA = torch.utils.data.TensorDataset(torch.arange(10.0)[:, None].expand(10, 4))
LOSSY = {**CONFIG, "zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}}
NO_SIZE = {"optimizer": CONFIG["optimizer"]}
CYCLE: dict[str, Any] = {}
CYCLE["itself"] = CYCLE


def with_groups(params: Any) -> Any:
    return make({**BARE, "optimizer": {"type": "Adam", "params": params}}, model_parameters=[{"params": []}])


OF_ARGUMENTS: list[tuple[type[Exception], str, Any]] = [
    (MeshError, "dist_init_required", lambda: make(dist_init_required=False)),
    (UnsupportedError, "`mpu`", lambda: make(mpu=MPU)),
    (ConfigError, "zeropp_loco_param", lambda: make(LOSSY)),
    (ConfigError, r"zero_optimization.stagge", lambda: make({**CONFIG, "zero_optimization.stagge": 3})),
    (UnsupportedError, "bias_correction", lambda: FUSED(model().parameters(), bias_correction=False)),
    (ConfigError, "train_micro_batch_size_per_gpu", lambda: make(NO_SIZE, training_data=DATA)),
    (ConfigError, r"`optimizer.params.lr`: must be a number", lambda: with_groups({"lr": "1e-3"})),
    (ConfigError, r"`optimizer.params`: must be a block", lambda: with_groups([1])),
    (UnsupportedError, r"`model_parameters`: must hold", lambda: make(model_parameters="head")),
]
OF_AN_ENGINE: list[tuple[type[Exception], str, Any]] = [
    (UnsupportedError, r"`engine.compile`.*`schedule`", lambda e: e.compile(schedule=[(0, [])])),
    (UnsupportedError, r"autograd_enabled`", lambda e: e.compile(compiled_autograd_enabled=True)),
    (NotHereError, r"`engine.offload_states`", lambda e: e.offload_states()),
    (NotHereError, r"`engine.train_batch`.*for each micro-batch", lambda e: e.train_batch(iter([DATA]))),
    (ValueError, "multiple", lambda e: e.set_train_batch_size(5)),
    (UnsupportedError, "num_local_io_workers", lambda e: e.deepspeed_io(DATA, num_local_io_workers=2)),
    (UnsupportedError, "a closure", lambda e: e.optimizer.step(lambda: None)),
    (UnsupportedError, "after the last backward of a step; got 0 backwards", lambda e: e.optimizer.step()),
    (CheckpointError, "the key `module`", lambda e: e.load_module_state_dict(model().state_dict())),
    (CheckpointError, "`load_dir`: must be a path", lambda e: e.load_checkpoint(None)),
    (ValueError, "`save_dir`: must be a path", lambda e: e.save_checkpoint(5)),
    (UnsupportedError, "hold themselves", lambda e: e.save_checkpoint("runs", client_state=CYCLE)),
    (CheckpointError, "from this rank and plan", lambda e: e.optimizer.load_state_dict({"param_groups": []})),
]


@pytest.mark.parametrize(("kind", "said", "call"), OF_ARGUMENTS)
def test_what_is_not_here_is_refused_by_name(kind: type[Exception], said: str, call: Any) -> None:
    with pytest.raises(kind, match=said):
        call()


def test_what_an_engine_has_not_is_refused_by_name() -> None:
    engine = make()[0]
    assert not hasattr(engine, "register_compile_pass") and not engine.is_compiled
    for kind, said, call in OF_AN_ENGINE:
        with pytest.raises(kind, match=said):
            call(engine)
    assert step(engine) > step(engine), "and it trains"
    engine.destroy()
    with pytest.raises(UnsupportedError, match="`eval_on_start=True`"):
        engine(torch.ones(2, 4))  # as a trainer does after the end


def test_momentum_that_a_schedule_brings_must_be_there_from_the_start() -> None:
    cycle = {"type": "OneCycleLR", "params": {"max_lr": 0.1, "total_steps": 9}}
    refused = pytest.raises(UnsupportedError, match="`momentum`: must be above 0 when the engine is made")
    for momentum, expected in ((0.0, refused), (0.9, contextlib.nullcontext())):
        sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": momentum}}
        engine = make({**CONFIG, "optimizer": sgd, "scheduler": cycle})[0]
        with expected:
            step(engine)
        engine.destroy()


def test_other_launchers_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshError, match="`MASTER_ADDR`"):
        deepspeed.init_distributed()  # never alone where others were started
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    deepspeed.init_distributed()
    assert torch.distributed.get_world_size() == 1


# --- optimizers and schedules -----------------------------------------------------------------------------


def test_optimizers_come_as_functions_or_not_at_all() -> None:
    blocks = {**CONFIG, "scheduler": {"type": "WarmupLR"}}
    passed = {"lr_scheduler": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}
    for config in (BARE, blocks):  # blocks beside objects are ignored, as in DeepSpeed
        make_sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
        engine, made, *_ = make(config, optimizer=make_sgd, **passed)
        policy = engine.running.plan.policy
        assert (policy.optimizer, policy.schedule) == (None, None)
        assert made.param_groups[0]["lr"] == 0.1 and engine.get_lr() == [0.1]
        engine.destroy()
    assert {"optimizer", "scheduler"} <= dict(policy.ignored).keys()
    engine, made, *_ = make(BARE)
    assert made is None
    with pytest.raises(UnsupportedError, match="must have an optimizer"):
        engine.backward(engine(torch.ones(2, 4)).sum())


def test_groups_of_parameters_keep_their_numbers() -> None:
    net = model()
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in net.parameters() if p.ndim == 1], "lr": 0.0, "weight_decay": 0.0},
    ]
    engine, optimizer, *_ = make(model=net, model_parameters=groups)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert engine.running.plan.policy.optimizer.type == "AdamW"
    assert changed(engine) == {"0.weight", "2.weight"}


def test_the_optimizer_is_live() -> None:
    engine, optimizer, *_ = make()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    step(engine)
    schedule.step()
    assert engine.get_lr() == [5e-3]
    optimizer.set_lr(0.25)
    assert engine.get_lr() == [0.25] and optimizer.get_lr() == 0.25
    with pytest.raises(UnsupportedError, match=r"add_param_group`: must be called before the engine"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    engine.destroy()
    del engine
    gc.collect()
    assert optimizer.state == {}  # Lightning asks when it tears down
    with pytest.raises(UnsupportedError, match="Keep the engine"):
        optimizer.param_groups  # noqa: B018


def test_schedules_come_as_objects_or_functions() -> None:
    engine, *_, schedule = make(lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
    step(engine)
    assert engine.get_lr() == [pytest.approx(1e-3)] and schedule is engine.lr_scheduler
    engine.destroy()
    increments: list[int] = []
    engine, *_ = make(lr_scheduler=SimpleNamespace(step=lambda increment=1: increments.append(increment)))
    engine.backward(engine(torch.ones(2, 4)).sum())
    engine.step(lr_kwargs={"increment": 16})
    assert increments == [16]


def test_deepspeeds_own_optimizers_are_torchs_with_bf16_moments_where_the_config_has_them() -> None:
    net = model()
    assert type(FUSED(net.parameters())) is torch.optim.AdamW
    assert type(deepspeed.ops.adam.DeepSpeedCPUAdam(net.parameters(), adamw_mode=False)) is torch.optim.Adam
    low = ("enabled", "bf16_master_weights_and_grads", "bf16_optimizer_states")
    net = model()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(net.parameters(), fp32_optimizer_states=False)
    with pytest.raises(UnsupportedError, match="where the config has fp32 moments"):
        make(BARE, model=net, optimizer=optimizer)
    engine, *_ = make({**BARE, "bf16": dict.fromkeys(low, True)}, model=net, optimizer=optimizer)
    assert step(engine) > step(engine)
    assert {row.columns.update.state.dtype for row in engine.running.plan.rows} == {DType.BF16}


# --- the engine -------------------------------------------------------------------------------------------


def test_getters_and_names_of_the_optimizer_tell_what_the_plan_does() -> None:
    engine, optimizer, *_ = make({**BF16, "gradient_clipping": 0.7})
    assert engine.bfloat16_enabled() and not engine.fp16_enabled() and engine.zero_optimization()
    assert engine.get_data_types() == (torch.bfloat16, torch.float32) and engine.gradient_clipping() == 0.7
    assert engine.get_mom() == [(0.9, 0.999)] and engine.loss_scale() == 0 and engine.dp_world_size == 1
    step(engine)
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() == engine.running.grad_norm > 0
    _, optimizer, *_ = make({**CONFIG, "fp16": {"enabled": True, "initial_scale_power": 4}})
    assert optimizer.needs_scaler() and optimizer.loss_scaler.cur_scale == 16.0


def test_batch_numbers_can_change_between_steps() -> None:
    engine, *_ = make()
    engine.set_train_batch_size(6)
    assert engine.get_batch_info() == (6, 2, 3)
    losses = [step(engine) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2] and engine.global_steps == 1


def test_a_loss_of_two_engines_trains_both_with_the_calls_of_older_scripts() -> None:
    alone, *pair = (make(BF16)[0] for _ in range(3))
    step(alone)
    sum(engine(torch.ones(2, 4)).float().square().mean() for engine in pair).backward()
    for engine in pair:
        engine._backward_epilogue()
    for engine in pair:
        engine.step()
        assert same(masters(engine), masters(alone))


# --- files ------------------------------------------------------------------------------------------------


AUTOCAST = {"torch_autocast": {"enabled": True}}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("mode", [{"bf16": {"enabled": True}, "precision": {"export": "fp32"}}, AUTOCAST])
def test_a_model_is_saved_whole_in_its_export_dtypes(stage: int, mode: Any, tmp_path: Path) -> None:
    """Weights under autocast are saved in fp32: a run that resumed from 16 bits would have another model."""
    from safetensors.torch import load_file

    engine, *_ = make({**CONFIG, "zero_optimization": {"stage": stage}, **mode})
    step(engine)
    assert engine.save_16bit_model(tmp_path) and engine.save_16bit_model(tmp_path, "model.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]
    for found in (torch.load(tmp_path / "pytorch_model.bin"), load_file(tmp_path / "model.safetensors")):
        assert found.keys() == engine.module.state_dict().keys()
        assert same(found, masters(engine))
    if mode is AUTOCAST:
        assert same(engine.module_state_dict(), masters(engine))
        assert not any(torch.equal(value, value.bfloat16().float()) for value in masters(engine).values())


def test_zero_to_fp32_splits_and_indexes(tmp_path: Path) -> None:
    engine, *_ = make({**CONFIG, "bf16": {"enabled": True}})
    engine.module.register_buffer("frequencies", torch.ones(2), persistent=False)
    step(engine)
    engine.save_checkpoint(tmp_path / "run")
    out = tmp_path / "out"
    zero_to_fp32.main([str(tmp_path / "run"), str(out), "--safe_serialization", "--max_shard_size", "100"])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(out.glob("*.safetensors"))) > 1
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "run")
    assert state.keys() == engine.module.state_dict().keys()
    assert same(state, masters(engine))


def test_a_second_run_replaces_the_tags_of_the_first(tmp_path: Path) -> None:
    first, *_ = make()
    step(first)
    first.save_checkpoint(tmp_path, "a", client_state={"run": 1})
    first.save_checkpoint(tmp_path, "b", client_state={"run": 1})
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "mp_rank_00_model_states.pt").write_bytes(b"as DeepSpeed leaves it")
    second, *_ = make()
    step(second)
    step(second)
    for tag in ("theirs", "a"):
        second.save_checkpoint(tmp_path, tag, client_state={"run": 2})
    after = step(second)
    third, *_ = make()
    assert third.load_checkpoint(tmp_path)[1] == {"run": 2}
    assert step(third) == after and third.global_steps == 3
    assert third.load_checkpoint(tmp_path, "b")[1] == {"run": 1}
    assert third.load_checkpoint(tmp_path, "theirs")[1] == {"run": 2}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="holds something else"):
        third.save_checkpoint(tmp_path, "mine")


# --- what others reach for ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "mode"), [(0, {}), (0, {"bf16": {"enabled": True}}), (1, {})])
def test_without_zero_the_optimizer_passes_for_the_callers(stage: int, mode: dict[str, Any]) -> None:
    net = model()
    mine = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **mode}
    engine, optimizer, *_ = make(config, model=net, optimizer=mine)
    passes = stage == 0 and "bf16" not in mode
    assert isinstance(optimizer, torch.optim.AdamW) is passes
    assert (optimizer == mine) is (mine == optimizer) is (mine in [optimizer]) is passes
    assert optimizer == engine.optimizer and isinstance(optimizer, DeepSpeedOptimizer)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def test_the_optimizer_steps_as_the_engine_does_but_for_the_schedule() -> None:
    def losses(by_optimizer: bool) -> list[float]:
        engine, optimizer, *_ = make(lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 1))
        found = []
        for _ in range(3):
            loss = engine(torch.ones(2, 4)).float().square().mean()
            engine.backward(loss)
            optimizer.step() if by_optimizer else engine.step()
            found.append(loss.item())
        assert engine.global_steps == 3 and engine.lr_scheduler.last_epoch == (0 if by_optimizer else 3)
        engine.destroy()
        return found

    assert losses(True) == losses(False)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_ranks_state_of_the_optimizer_goes_out_and_in(stage: int) -> None:
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine, optimizer, *_ = make(config)
    step(engine)
    step(engine)
    state = copy.deepcopy(optimizer.state_dict())
    after = [step(engine) for _ in range(3)]
    other, its, *_ = make(config)
    its.load_state_dict(state)
    assert [step(other) for _ in range(3)] == after
