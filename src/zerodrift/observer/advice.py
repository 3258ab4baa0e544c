"""What to do about a finding, with the library that runs the model."""

from __future__ import annotations

from zerodrift.observer.seen import SeenModel


def library_of(model: SeenModel) -> str:
    """What runs the model, for advice."""
    if "DeepSpeedEngine" in model.wrappers:
        return "deepspeed"
    if any(parameter.layout.startswith("sharded") for parameter in model.parameters):
        return "fully_shard"
    if "FullyShardedDataParallel" in model.wrappers:
        return "fsdp"
    return "ddp" if "DistributedDataParallel" in model.wrappers else ""


MASTERS = {
    "": "Keep the weights in fp32 and compute under `torch.autocast`, or update fp32 copies of them.",
    "ddp": "Keep the weights in fp32 and compute under `torch.autocast`, or update fp32 copies of them.",
    "fully_shard": "Load the weights in fp32, and give `fully_shard` a `MixedPrecisionPolicy`.",
    "fsdp": "Load the weights in fp32, and give FSDP a `MixedPrecision`.",
    "deepspeed": "Leave `bf16_master_weights_and_grads`, `bf16_optimizer_states` and their like off.",
}

SUMS = {
    "": "Keep gradients in fp32: fp32 weights under autocast do.",
    "ddp": "Keep gradients in fp32: fp32 weights under autocast do.",
    "fully_shard": "Give `MixedPrecisionPolicy` `reduce_dtype=torch.float32`, or reduce every micro-batch.",
    "fsdp": "Give `MixedPrecision` `reduce_dtype=torch.float32`, or reduce every micro-batch.",
    "deepspeed": "Set `data_types.grad_accum_dtype` to fp32 with ZeRO stage 3 or, in bf16, with stage 1: "
    "other stages ignore it before DeepSpeed 0.19.8.",
}

AVERAGES = {
    "": "Average the gradients of all ranks before the optimizer's step.",
    "deepspeed": "Remove `data_types.grad_accum_dtype`, or use ZeRO stage 3: before DeepSpeed 0.19.8, "
    "stage 1 loses the average where it is not the model's dtype.",
}
