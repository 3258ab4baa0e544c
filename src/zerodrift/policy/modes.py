"""The mode of a config: the rule for `auto`, and for flags that contradict each other.

The rule is the table of flags in `docs/config.md`, the same on every backend; a test checks every row.
Nothing else in zerodrift reads `bf16.enabled`, `fp16.enabled` or `torch_autocast.enabled`.

Invariant: the mode depends on the written flags only, never on a device, a backend or a model.
"""

from __future__ import annotations

from typing import Literal

from zerodrift.config import Config, TorchAutocast
from zerodrift.dtypes import DType
from zerodrift.errors import Problems
from zerodrift.policy.decisions import Decision, Mode

Flag = Literal["absent", "auto", "true", "false"]


def flag(value: bool | str | None) -> Flag:
    """Return the written form of a key that may be true, false, auto or absent."""
    if value is None or value == "auto":
        return "auto" if value else "absent"
    return "true" if value else "false"


def from_flags(bf16: Flag, fp16: Flag, asks: bool) -> tuple[Mode | None, str]:
    """Return the mode and its reason; None if both are true. `asks`: `precision.mode` is `auto`."""
    if bf16 == fp16 == "true":
        return None, "both `bf16.enabled` and `fp16.enabled` are true"
    if bf16 == "true":
        return Mode.BF16, "`bf16.enabled` is true"
    if fp16 == "true":
        return Mode.FP16, "`fp16.enabled` is true"
    asked = [name for name, on in (("bf16.enabled", bf16), ("fp16.enabled", fp16)) if on == "auto"]
    asked += ["precision.mode"] if asks else []
    if not asked:
        return Mode.FP32, "nothing asks for mixed precision"
    auto = " and ".join(f"`{key}`" for key in asked) + (" is auto" if len(asked) == 1 else " are auto")
    if bf16 == "false":
        return Mode.FP32, f"{auto}, but `bf16.enabled` is false, and fp16 is never chosen by itself"
    return Mode.BF16, f"{auto} and bf16 is not ruled out"


def decide_mode(config: Config, problems: Problems) -> Decision:
    """Decide the mode of a config, with its reason; contradictions go to `problems`."""
    bf16 = flag(config.bf16.enabled if config.bf16 else None)
    fp16 = flag(config.fp16.enabled if config.fp16 else None)
    written = config.precision.mode
    autocast = config.torch_autocast
    if autocast is not None and autocast.enabled:
        return _autocast(config, autocast, bf16, fp16, problems)
    if written is None or written == "auto":
        mode, why = from_flags(bf16, fp16, asks=written == "auto")
        if mode is None:
            must = "must not be true together with `fp16.enabled`"
            problems.add("bf16.enabled", must, got="both", do="Keep one of the two.")
            mode = Mode.BF16
        return Decision("precision.mode", str(mode), why)
    mode = Mode(written)
    must = f"must agree with `precision.mode`, which is {mode}"
    for key, state, own in (("bf16.enabled", bf16, Mode.BF16), ("fp16.enabled", fp16, Mode.FP16)):
        if state == ("false" if mode is own else "true"):
            problems.add(key, must, got=state, do=f"Remove `{key}` or `precision.mode`.")
    if mode.autocast and autocast is not None:
        do = "Remove one of the two keys."
        if autocast.enabled is False:
            problems.add("torch_autocast.enabled", must, got="false", do=do)
        if autocast.dtype not in (None, mode.dtype):
            problems.add("torch_autocast.dtype", must, got=autocast.dtype, do=do)
    return Decision("precision.mode", str(mode), "`precision.mode`")


def _autocast(config: Config, block: TorchAutocast, bf16: Flag, fp16: Flag, problems: Problems) -> Decision:
    dtype = block.dtype or DType.BF16
    why = "`torch_autocast.enabled` is true"
    if block.dtype is None:
        why += "; its `dtype` is not given: bf16, which needs no loss scale"
    if dtype is DType.FP32:
        do = "For fp32, turn autocast off."
        problems.add("torch_autocast.dtype", "must be bf16 or fp16", got="fp32", do=do)
        dtype = DType.BF16
    mode = Mode(f"autocast-{dtype}")
    written = config.precision.mode
    if written not in (None, "auto", mode.value):
        must = f"must agree with `torch_autocast`, which says {mode}"
        do = "Remove `precision.mode` or the `torch_autocast` block."
        problems.add("precision.mode", must, got=written, do=do)
    for key, state, own in (("bf16", bf16, DType.BF16), ("fp16", fp16, DType.FP16)):
        if state != "true":
            continue
        if low_masters(config, own) and own is dtype:
            why += f"; `{key}.enabled` only sets the dtype of parameters, masters and accumulator"
            continue
        must = "must not be true together with `torch_autocast.enabled`"
        do = (
            f"Autocast keeps parameters in fp32: set `{key}.enabled` to false. Only with "
            f"`{key}.{key}_master_weights_and_grads: true` and the same autocast dtype may both be on: "
            f"then the flag sets the dtype of parameters, masters and accumulator."
        )
        problems.add(f"{key}.enabled", must, got="both", do=do)
    return Decision("precision.mode", str(mode), why)


def low_masters(config: Config, dtype: DType) -> bool:
    """Return True if the block of `dtype` is on and keeps masters and accumulator in that dtype."""
    return _is_on(config, dtype) and f"{dtype}.{dtype}_master_weights_and_grads" in _flags(config)


def low_moments(config: Config) -> bool:
    """Return True if the block `bf16` is on and keeps moments in bf16."""
    return _is_on(config, DType.BF16) and "bf16.bf16_optimizer_states" in _flags(config)


def _is_on(config: Config, dtype: DType) -> bool:
    block = config.bf16 if dtype is DType.BF16 else config.fp16
    if block is None or block.enabled in (True, False):
        return block is not None and block.enabled is True
    return config.precision.mode == str(dtype)


def _flags(config: Config) -> list[str]:
    """Return the keys by which `bf16` and `fp16` change columns, where they are true."""
    flags = ("bf16_master_weights_and_grads", "bf16_optimizer_states", "fp16_master_weights_and_grads")
    pairs = [(flag.partition("_")[0], flag) for flag in flags]
    return [f"{block}.{flag}" for block, flag in pairs if getattr(getattr(config, block), flag, None)]


def flags_without_effect(config: Config) -> tuple[tuple[str, str], ...]:
    """Return (key, reason) for each flag of a block that is off."""
    off = [key for key in _flags(config) if not _is_on(config, DType(key.partition(".")[0]))]
    return tuple((key, f"`{key.partition('.')[0]}.enabled` is not true") for key in off)
