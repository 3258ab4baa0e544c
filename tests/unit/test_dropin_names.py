"""The drop-in's surface: its imports, its arguments, its refusals, and the names that frameworks use."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pickle
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import zerodrift.deepspeed as deepspeed
from zerodrift.deepspeed.engine import DeepSpeedEngine
from zerodrift.deepspeed.modules import MODULES_ABSENT, NAMES_ABSENT, NotHereError
from zerodrift.deepspeed.tables import ROOT
from zerodrift.deepspeed.tools import estimates
from zerodrift.errors import UnsupportedError

_IMPORTED = """
comm: all_reduce get_rank init_distributed ReduceOp
"": checkpointing __git_hash__ __git_branch__ logger log_dist
checkpointing:
launcher.runner: DEEPSPEED_ENVIRONMENT_NAME main
moe.utils: is_moe_param has_moe_layers split_params_into_different_moe_groups_for_optimizer
ops.op_builder: ALL_OPS CPUAdamBuilder FusedAdamBuilder AsyncIOBuilder
runtime.activation_checkpointing.checkpointing: checkpoint configure
runtime.fp16.loss_scaler: LossScaler DynamicLossScaler
runtime.zero.config: ZeroStageEnum DeepSpeedZeroConfig
runtime.zero.offload_config: OffloadDeviceEnum DeepSpeedZeroOffloadOptimizerConfig
runtime.zero.stage3: DeepSpeedZeroOptimizer_Stage3
utils.tensor_fragment: safe_get_full_fp32_param fragment_address
ops.adam: DeepSpeedCPUAdam FusedAdam
pipe: PipelineModule LayerSpec
runtime.config: DeepSpeedConfigError ADAM_OPTIMIZER
runtime.dataloader: DeepSpeedDataLoader RepeatingLoader
runtime.engine: DeepSpeedEngine
runtime.lr_schedules: WarmupLR VALID_LR_SCHEDULES
runtime.zero.partition_parameters: ZeroParamStatus GatheredParameters
utils: safe_get_full_grad RepeatingLoader logger set_z3_leaf_modules
utils.zero_to_fp32: get_fp32_state_dict_from_zero_checkpoint
zero: Init GatheredParameters register_external_parameter
"""

IMPORTED = {module: tuple((names or "").split()) for module, names in yaml.safe_load(_IMPORTED).items()}
IMPORTED |= dict.fromkeys(
    ("ops.adam.cpu_adam", "ops.lamb.fused_lamb", "runtime.data_pipeline.curriculum_scheduler"), ("__doc__",)
)
"""Modules and names that scripts and tutorials import."""

ENGINE = (
    *("forward", "backward", "step", "scale", "no_sync", "coalesce_grad_reduction", "zero_grad", "train"),
    *("is_gradient_accumulation_boundary", "set_gradient_accumulation_boundary", "was_step_applied"),
    *("get_global_grad_norm", "get_lr", "get_mom", "get_type", "get_batch_info", "deepspeed_io", "eval"),
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "destroy"),
    *("set_train_batch_size", "set_train_micro_batch_size", "set_data_post_process_func"),
    *("save_checkpoint", "load_checkpoint", "save_16bit_model", "save_fp16_model", "module_state_dict"),
    *("_zero3_consolidated_16bit_state_dict",),
)


@pytest.mark.parametrize(("module", "names"), IMPORTED.items(), ids=list(IMPORTED))
def test_what_scripts_import_is_there(module: str, names: tuple[str, ...]) -> None:
    found: Any = deepspeed
    if module != "checkpointing":  # an attribute alone
        found = importlib.import_module(f"zerodrift.deepspeed.{module}".rstrip("."))
    assert all(getattr(found, name) is not None for name in names)
    assert found is deepspeed or there(f"deepspeed.{module}")


def test_an_absent_name_can_be_imported_and_says_no_when_it_is_used() -> None:
    from zerodrift.deepspeed.pipe import PipelineModule

    assert not isinstance(object(), PipelineModule) and not hasattr(PipelineModule, "_any")
    with pytest.raises(UnsupportedError, match=r"`deepspeed.pipe.PipelineModule.from_layers`.*stage: 3"):
        PipelineModule.from_layers([])

    class Mine(PipelineModule, torch.nn.Module):  # type: ignore[misc]
        pass

    assert issubclass(Mine, PipelineModule) and not issubclass(torch.nn.Linear, PipelineModule)
    with pytest.raises(UnsupportedError, match=r"`deepspeed.pipe.PipelineModule`.*stage: 3"):
        Mine()


def test_every_absent_name_says_what_to_use() -> None:
    for module in NAMES_ABSENT.keys() | MODULES_ABSENT.keys():
        names = {**NAMES_ABSENT.get(module, {})}
        if module in MODULES_ABSENT:
            names["AnyName"] = MODULES_ABSENT[module]
        path = "zerodrift.deepspeed" if module == ROOT else f"zerodrift.deepspeed.{module}"
        there = importlib.import_module(path)
        for name, instead in names.items():
            assert instead.endswith(".") and getattr(there, name) is getattr(there, name), name
            with pytest.raises(UnsupportedError, match=f"{name}.*{re.escape(instead)}"):
                getattr(there, name)()


def test_an_unknown_name_is_an_attribute_error_with_the_nearest() -> None:
    assert not hasattr(deepspeed, "initalize")
    with pytest.raises(NotHereError, match="`initialize`"):
        deepspeed.initalize  # noqa: B018


def test_the_accelerator_answers_or_names_torchs_own() -> None:
    found = deepspeed.get_accelerator()
    assert found.device_name() in ("cpu", "cuda") and found.device_count() >= 1
    assert found.communication_backend_name() in ("gloo", "nccl") and found.supported_dtypes()
    with pytest.raises(NotHereError, match=r"torch\."):
        found.create_op_builder  # noqa: B018


def test_made_modules_are_like_any_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values pickle by their file, and `python -m` finds their code."""
    for value in (deepspeed.zero.ZeroParamStatus.AVAILABLE, deepspeed.utils.safe_get_full_grad):
        assert pickle.loads(pickle.dumps(value)) is value
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module("zerodrift.deepspeed.utils.zero_to_fp32", run_name="__main__", alter_sys=True)
    assert "checkpoint_dir output_dir" in " ".join(capsys.readouterr().out.split())


# --- against the installed package ------------------------------------------------------------------------

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


def real(name: str = "") -> Any:
    return importlib.import_module(f"deepspeed{'.' if name else ''}{name}")


WHATEVER = [inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD]


def inside(function: Any) -> Any:
    """Return the function below DeepSpeed's decorators, which hide it."""
    while [p.kind for p in inspect.signature(function).parameters.values()] == WHATEVER:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        function = next(held for held in cells if inspect.isfunction(held))
    return function


def arguments(function: Any) -> list[tuple[str, Any]]:
    """Return names and defaults, in order, without the defaults that only feed DeepSpeed's log."""
    found = []
    for parameter in inspect.signature(inside(function)).parameters.values():
        default = parameter.default
        if parameter.name in ("debug", "include", "tensor_overrides"):
            default = None
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            default = float(default)
        if not isinstance(default, (str, float, bool, type(None), tuple, dict)):
            default = str(default)
        found.append((parameter.name, default))
    return found


@needs_deepspeed
@pytest.mark.parametrize("name", ENGINE)
def test_a_method_takes_what_deepspeeds_takes(name: str) -> None:
    mine, theirs = getattr(DeepSpeedEngine, name), getattr(real().DeepSpeedEngine, name)
    if name == "zero_grad":  # torch's modules have it with an argument
        assert arguments(theirs) == arguments(mine)[:1]
    else:
        assert arguments(mine) == arguments(theirs)


@needs_deepspeed
def test_a_function_takes_what_deepspeeds_takes() -> None:
    utils = [name for name in deepspeed.utils.__all__ if name.startswith(("safe_", "set_z3", "log_dist"))]
    for module, names in {
        "": ["initialize", "init_distributed", "add_config_arguments"],
        "runtime.zero": [*IMPORTED["zero"], "unwrap_model_for_generation"],
        "utils": utils,
        "utils.zero_to_fp32": sorted({*deepspeed.utils.zero_to_fp32.__all__} - {"main"}),
        "runtime.lr_schedules": deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES,
        "ops.adam": ["FusedAdam", "DeepSpeedCPUAdam"],
    }.items():
        mine = importlib.import_module(f"zerodrift.deepspeed.{module}".rstrip("."))
        for name in names:
            assert arguments(getattr(mine, name)) == arguments(getattr(real(module), name)), name


# --- what frameworks reach for in their source ------------------------------------------------------------

FRAMEWORKS = ("accelerate", "transformers", "lightning", "peft", "trl")

THEIRS = {
    "deepspeed.utils.is_initialized",  # of transformers' ESMFold, for a DeepSpeed of 2022
    "deepspeed.dtypes",
}
"""Names that DeepSpeed 0.19.6 lacks too."""


def names_used(tree: ast.AST) -> Iterator[str]:
    """Yield dotted names under `deepspeed`."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and not node.level
            and (node.module or "").startswith("deepspeed")
        ):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("deepspeed."))
        elif isinstance(node, ast.Attribute):
            found = ast.unparse(node)
            if found.startswith("deepspeed.") and found.replace(".", "").isidentifier():
                yield found


def there(name: str) -> bool:
    """Return whether the drop-in has the name, as an attribute or as a module."""
    at: Any = importlib.import_module("zerodrift.deepspeed")
    path = "zerodrift.deepspeed"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:
            at = getattr(at, part)
        except AttributeError:
            if not hasattr(at, "__path__") or importlib.util.find_spec(path) is None:
                return False
            at = importlib.import_module(path)
        if isinstance(at, type):
            return True
    return True


@pytest.mark.long
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_a_framework_reaches_for_is_there(framework: str) -> None:
    spec = importlib.util.find_spec(framework)
    if spec is None or spec.origin is None:
        pytest.skip(f"{framework} is not installed")
    names, seen = set[str](), set[bytes]()
    for path in Path(spec.origin).parent.rglob("*.py"):
        text = path.read_bytes()
        uses = {*re.findall(rb"deepspeed\.[\w.]+|from deepspeed.*", text)}
        if uses - seen and "test" not in path.parts:  # most models say what another said
            names |= set(names_used(ast.parse(text)))
            seen |= {use for use in uses if not use.endswith(b"(")}
    own = {name for name in names if not name.startswith("deepspeed.transformers")} - THEIRS
    assert own, "it reaches for nothing, and this test sees nothing"
    assert sorted(name for name in own if not there(name)) == []


def test_a_name_that_is_nowhere_is_seen() -> None:
    text = "import deepspeed.nowhere\nfrom deepspeed.zero import Init, Unit\ndeepspeed.comm.get_rank()"
    missing = {name for name in names_used(ast.parse(text)) if not there(name)}
    assert missing == {"deepspeed.nowhere", "deepspeed.zero.Unit"}


# --- estimates of memory ----------------------------------------------------------------------------------


def test_estimates_count_tied_weights_once_and_follow_deepspeeds_formulas() -> None:
    tied = nn.Sequential(nn.Embedding(100, 100), nn.Linear(100, 100), nn.Linear(100, 100, bias=False))
    tied[2].weight = tied[0].weight
    assert estimates._count(tied) == (20_100, 10_100)
    two = estimates.estimate_zero2_model_states_mem_needs
    assert two(1000, 4, 2, cpu_offload=True) == (48_000, 2000)
    assert two(1000, 4, 2, cpu_offload=False) == (24_000, 2000 + 2250)
    three = estimates.estimate_zero3_model_states_mem_needs
    assert three(1000, 100, 4, 2) == (13_500, 400, 400)
    assert three(1000, 100, 4, 2, cpu_offload_params=False) == (12_000, 400 + 250, 400)
    assert three(1000, 100, 4, 2, cpu_offload=False, zero_init=False) == (24_000, 400 + 2250, 400)
