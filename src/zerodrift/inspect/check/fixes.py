"""The config that fixes the findings of a run: for the library that ran, and for zerodrift.

Invariant: pure. Every line fixes a finding.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from zerodrift.inspect.check.table import BITS, Kind, RunFinding, library
from zerodrift.inspect.trace import ModelRecord, ProcessRecord

_WEIGHTS: tuple[Kind, ...] = ("no-master", "norm-in-16-bits", "upcast-without-effect", "state-too-narrow")
_SUMS: tuple[Kind, ...] = ("rounded-before-accumulation", "wire-in-16-bits")
_PINNED: tuple[Kind, ...] = ("router-in-16-bits", "logits-rounded")

_ENGINE = frozenset((*_WEIGHTS, *_SUMS, *_PINNED, "states-rounded", "weights-rounded", "buffer-rounded"))
"""Findings that zerodrift's engine avoids by its defaults or with a pin."""

_COMMENT = 46  # column of the comment that names a finding


def fixes(processes: Sequence[ProcessRecord], findings: Sequence[RunFinding]) -> list[tuple[str, str]]:
    """Return (library, code or JSON) for the library that ran and for zerodrift, where it helps."""
    models = [model for model in processes[0].models if model.trained]
    if not models:
        return []
    kinds = {finding.kind for finding in findings}
    blocks = [("zerodrift", _zerodrift(models, findings))] if kinds & _ENGINE else []
    if not any("zerodrift.Engine" in model.wrappers for model in models):
        name, text = _theirs(processes[0], models[0], kinds)
        blocks = [*([(name, text)] if text else []), *blocks]
    return blocks


_TRAINERS = {
    "lightning": ("Lightning", 'Trainer(precision="{}-mixed")', "16"),
    "pytorch_lightning": ("Lightning", 'Trainer(precision="{}-mixed")', "16"),
    "transformers.trainer": ("transformers", "TrainingArguments({}=True)", "fp16"),
    "accelerate": ("accelerate", 'Accelerator(mixed_precision="{}")', "fp16"),
}
"""Module -> its name, the call that sets a precision, and its word for fp16."""


def _theirs(process: ProcessRecord, model: ModelRecord, found: set[Kind]) -> tuple[str, str]:
    """Return the name of the library that ran, and the code that fixes the findings there."""
    kind, half = library(model), _half(process.models)
    if kind == "deepspeed":
        return "DeepSpeed", _deepspeed(model, found, half)
    lines: list[str] = []
    if found & {*_WEIGHTS, "weights-rounded"}:
        lines.append(_line("model = model.float()", found, (*_WEIGHTS, "weights-rounded")))
    trainer = next((name for name in _TRAINERS if name in process.libraries), "")
    if kind in _SHARDED:
        # A cast where weights compute adds no digit to what was gathered in 16 bits.
        is_narrow = any(parameter.has("gather", dtype) for parameter in model.parameters for dtype in BITS)
        units = _wide_units(kind, found) if is_narrow else []
        lines += _sharded(kind, found, half, units)
        return _SHARDED[kind][0], "\n".join([*lines, *_script(found - {*_PINNED} if units else found)])
    title = _TRAINERS[trainer][0] if trainer else "torch"
    if found & {*_WEIGHTS, *_SUMS} and trainer:
        _, call, fp16 = _TRAINERS[trainer]
        lines.append(call.format("bf16" if half == "bfloat16" else fp16))
    elif found & {*_WEIGHTS, *_SUMS}:
        lines += [f"with torch.autocast(inputs.device.type, torch.{half}):", "    logits = model(inputs)"]
        if any(event["kind"] == "communication-hook" for event in process.events):
            lines.append(_line("# no hook: DistributedDataParallel(model)", found, ("wire-in-16-bits",)))
    return title, "\n".join([*lines, *_script(found)])


_SHARDED = {
    "fully_shard": ("fully_shard", "MixedPrecisionPolicy", "fully_shard(model, mp_policy=policy)"),
    "fsdp": ("FullyShardedDataParallel", "MixedPrecision", "model = FSDP(model, mixed_precision=policy)"),
}
"""Word for a library -> its name, its class of policies, and the call that takes one."""


def _sharded(kind: str, found: set[Kind], half: str, units: list[str]) -> list[str]:
    """Return the lines of a policy, and those of units, which come before the whole model.

    FSDP adds micro-batches in the dtype of its flat parameters, whatever the policy says.
    """
    _, policy, call = _SHARDED[kind]
    by_policy: tuple[Kind, ...] = _SUMS if kind == "fully_shard" else ("wire-in-16-bits",)
    lines = units
    if found & {*_WEIGHTS, *by_policy}:
        lines = [_line(f"policy = {policy}(", found, by_policy), f"    param_dtype=torch.{half},"]
        lines += ["    reduce_dtype=torch.float32,", ")", *units]
        lines += [] if units and kind == "fsdp" else [call]
    if units and kind == "fsdp":
        lines = [*lines, "model = FSDP(model, auto_wrap_policy=units, mixed_precision=policy)"]
    if kind == "fsdp" and _SUMS[0] in found:
        lines = [*lines, _line("# no `with model.no_sync():`", found, _SUMS[:1])]
    return lines


_MODULES: tuple[tuple[Kind, str], ...] = (("router-in-16-bits", "router"), ("logits-rounded", "head"))
"""A finding about one module, which has to compute in fp32, and a name for that module."""


def _wide_units(kind: str, found: set[Kind]) -> list[str]:
    """Return the lines that make modules units of their own, which gather fp32 and cast their input to it.

    `MixedPrecisionPolicy` casts the input of a unit unless told; `MixedPrecision` does so only for the root.
    """
    kinds = [finding for finding, _ in _MODULES if finding in found]
    modules = [module for finding, module in _MODULES if finding in found]
    if not modules:
        return []
    if kind == "fully_shard":
        wide = _line("wide = MixedPrecisionPolicy(torch.float32)", found, kinds)
        return [wide, *(f"fully_shard({module}, mp_policy=wide)" for module in modules)]
    is_wide = f"m is {modules[0]}" if len(modules) == 1 else f"m in ({', '.join(modules)})"
    lines = [_line("wide = MixedPrecision(", found, kinds), "    param_dtype=torch.float32,"]
    lines += ["    cast_forward_inputs=True,", ")"]
    lines += ["def is_unit(m):", f"    if {is_wide}:", '        return {"mixed_precision": wide}']
    return [*lines, "    return isinstance(m, Block)", "units = CustomPolicy(is_unit)"]


def _script(found: set[Kind]) -> list[str]:
    """Return the lines for the script, which are the same for every library."""
    lines = []
    if "loss-in-16-bits" in found:
        lines.append(_line("loss = loss_of(logits.float(), targets)", found, ("loss-in-16-bits",)))
    for kind, weight in _MODULES:
        if kind in found:
            lines.append(_line("with torch.autocast(x.device.type, enabled=False):", found, (kind,)))
            lines.append(f"    logits = linear(x.float(), {weight}.weight.float())")
    if "average-in-16-bits" in found:
        lines.append(_line("average = copy.deepcopy(model).float()", found, ("average-in-16-bits",)))
    return lines


def _line(code: str, found: set[Kind], kinds: Sequence[Kind]) -> str:
    fixed = next((kind for kind in kinds if kind in found), "")
    return f"{code:<{_COMMENT}}  # {fixed}" if fixed else code


def _deepspeed(model: ModelRecord, found: set[Kind], half: str) -> str:
    """Return the keys to change, and lines for the script.

    Autocast of DeepSpeed sends the gradients of the modules that it lowers in their dtype, and clips before
    it divides by a loss scale. Stages below 3 add micro-batches in another dtype than the model's, and keep
    the average, only from DeepSpeed 0.19.8 on.
    """
    short = "bf16" if half == "bfloat16" else "fp16"
    is_autocast = any(p.has("storage", "float32") and p.has("compute", half) for p in model.parameters)
    config: dict[str, Any] = {}
    autocast = {"enabled": True, "dtype": half, "lower_precision_safe_modules": []}
    if not is_autocast and found & {*_PINNED}:
        config = {short: {"enabled": False}, "torch_autocast": autocast}
    elif is_autocast and found & {"wire-in-16-bits", "norm-of-scaled-gradients"}:
        scaled = "norm-of-scaled-gradients" in found
        config["torch_autocast"] = {**autocast, "dtype": "bfloat16"} if scaled else autocast
    elif found & {*_WEIGHTS}:
        states = {"bf16_optimizer_states": False} if short == "bf16" else {}
        config[short] = {"enabled": True, f"{short}_master_weights_and_grads": False, **states}
    if found & {"rounded-before-accumulation", "not-averaged"}:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
        if not is_autocast:
            config["zero_optimization"] = {"stage": 3}
    if "wire-in-16-bits" in found and "torch_autocast" not in config:
        config["communication_data_type"] = "fp32"
    lines = [json.dumps(config, indent=2)] if config else []
    if short in config and "torch_autocast" in config:
        lines.append("model = model.float()  # before `deepspeed.initialize`")
    return "\n".join([*lines, *_script(found)])


def _zerodrift(models: Sequence[ModelRecord], findings: Sequence[RunFinding]) -> str:
    """Return a config whose defaults keep masters, sums, states and the wire in fp32."""
    mode = "bf16" if _half(models) == "bfloat16" else "fp16"
    precision: dict[str, object] = {"mode": mode}
    names = [name for finding in findings if finding.kind in _PINNED for name in finding.names]
    globs = dict.fromkeys(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name) for name in names)
    if globs:
        precision["rules"] = [{"match": glob, "pin": "fp32", "output": "keep"} for glob in globs]
    is_sharded = any(library(model) in ("fully_shard", "fsdp") for model in models)
    config = {"precision": precision, "zero_optimization": {"stage": 3 if is_sharded else 1}}
    text = json.dumps(config, indent=2)
    return _RULE.sub(lambda rule: "{" + re.sub(r"\s+", " ", rule[1]) + "}", text)


_RULE = re.compile(r"\{\s+(\"match\"[^}]*?)\s+\}")


def _half(models: Sequence[ModelRecord]) -> str:
    """Return the dtype of 16 bits that the models compute in; bf16 where there is none."""
    used = (p.dtypes("compute") for model in models for p in model.parameters)
    seen = {dtype for dtypes in used for dtype in dtypes}
    return "float16" if "float16" in seen and "bfloat16" not in seen else "bfloat16"
