"""Cases in which DeepSpeed 0.19.6 silently departs from its config, and zerodrift's behaviour there. Data.

Only differences that a user can see are listed: a number, a norm, a step that ran or was skipped. `reference`
prints them.

Invariant: each behaviour of DeepSpeed was measured by running 0.19.6, or is plain in its code.
"""

from __future__ import annotations

Difference = tuple[str, str, str]
"""(the keys or calls, DeepSpeed 0.19.6, zerodrift)"""

ACCUMULATION: tuple[Difference, ...] = (
    (
        "`gradient_accumulation_dtype` at top level",
        "Drops the key, as every unknown key at top level, in `torch_autocast` and in `data_types`.",
        "The key sets the `accumulate` column. An unknown key is an error with the nearest match.",
    ),
    (
        "`data_types.grad_accum_dtype` at stage 2",
        "Ignores it: micro-batches are summed in the parameters' dtype.",
        "One meaning at every stage.",
    ),
    (
        "`data_types.grad_accum_dtype` at stage 1, other than the model's dtype (but for bf16 with fp32 and "
        "no offload)",
        "Does not average over ranks: each shard is updated with its owner's gradients alone. No warning.",
        "Averages over ranks, at every stage and with offload.",
    ),
    (
        "bf16 with `data_types.grad_accum_dtype: fp32` at stage 1",
        "Sums micro-batches in fp32, then rounds the sum to bf16 to reduce it: 2048 + 15 x 0.5 stays 2048.",
        "`accumulate` and `reduce` are two columns. The plan prints both, and neither narrows the other.",
    ),
    (
        "`communication_data_type: fp32` with a 16-bit accumulator",
        "Reduces in fp32 and rounds the sum to the accumulator's 16 bits: nothing is gained.",
        "The sum rests in `accumulate`, which is fp32 by default.",
    ),
    (
        "`communication_data_type` with `torch_autocast`, stages 1-3",
        "Ignores it: the autocast dtype goes on the wire.",
        "The key sets the wire dtype of every parameter that no rule pins.",
    ),
    (
        "`gradient_accumulation_steps: 1`, several `backward` calls, then `step`",
        "Sums them at stages 0 and 3, keeps only the last at stages 1 and 2.",
        "Sums them at every stage.",
    ),
    (
        "`prescale_gradients`, `gradient_predivide_factor` at stage 1",
        "Ignores both.",
        "Divides before the reduction, at every stage.",
    ),
    (
        "`contiguous_gradients: false` on a CPU, stages 1-2",
        "Never reduces gradients.",
        "There is one reduction; the key is listed as ignored.",
    ),
)

SCALING: tuple[Difference, ...] = (
    (
        "`fp16` at stage 0",
        "Does not multiply the loss by the scale, yet divides the gradients by it.",
        "The loss is multiplied and the gradients are divided by the same scale, at every stage.",
    ),
    (
        "`torch_autocast` in fp16, stages 1-3: the norm",
        "Reports the norm of the scaled gradients: 16384 for a true 0.25.",
        "Reports the norm of the true gradients.",
    ),
    (
        "`torch_autocast` in fp16, stages 1-3: clipping",
        "Clips the scaled gradients: with `gradient_clipping: 100` and a true norm of 0.25, the update was "
        "164 times too small.",
        "Clips the true gradients.",
    ),
    (
        "`torch_autocast` in fp16, stages 1-2: an overflow on one rank",
        "That rank skips and halves its scale, the others step. Weights and scales differ from then on.",
        "All ranks skip together.",
    ),
    (
        "`torch_autocast` without `dtype`",
        "Takes the device's default, fp16 on CUDA, and makes no loss scale for it.",
        "bf16, which needs none; the plan says so.",
    ),
    (
        "A non-finite gradient in fp32, in `torch_autocast`, or in bf16 at stage 3",
        "Applies it, counts no skipped step and reports a norm of 1.0. At stage 3 "
        "`bf16.check_grad_overflow: true` changes nothing.",
        "Skips the step, or raises where `bf16.check_grad_overflow` is false; in every mode, at every stage.",
    ),
    ("`get_global_grad_norm()` at stage 0 in fp32 and `torch_autocast`", "Is None.", "Is the norm."),
)

WEIGHTS: tuple[Difference, ...] = (
    (
        "A router, a norm or any other parameter that should stay fp32 under `bf16` or `fp16`",
        "Casts every parameter.",
        "A rule pins it: by name, by class, or with `zero_optimization.fp32_pinned_parameters`.",
    ),
    (
        "A model in fp32 under `bf16` or `fp16`",
        "Rounds the weights first and makes the fp32 masters from the rounded weights.",
        "Masters start from the model's own bits.",
    ),
    (
        "A model that holds both bf16 and fp32 parameters, no mode written",
        "Promotes all to fp32 at stages 1-2; fails on an assertion at stage 3.",
        "A row per parameter; what differs from the mode is printed with its reason.",
    ),
    (
        "`bf16.bf16_master_weights_and_grads` with fp32 accumulation at stage 1",
        "Keeps an fp32 master.",
        "Two keys that contradict each other are an error that names both.",
    ),
    (
        "`GatheredParameters(modifier_rank=0)` around a write, after `initialize`",
        "Writes the visible weights only, also in fp32 at stage 3: the next step puts the old master back.",
        "Writes the masters too, at every stage.",
    ),
    (
        "16-bit training at stage 0",
        "Takes an optimizer step on zero gradients at start: Adam counts it and AdamW already decays.",
        "The first step is the first step.",
    ),
    (
        "`data_types.buffer_dtype: fp32` under `zero.Init`",
        "Gives fp32 buffers that hold bf16-rounded values.",
        "Buffers are kept as the model made them unless a key casts them.",
    ),
    (
        "A second engine after one with `torch_autocast`",
        "Inherits its settings: they are global to the process.",
        "An engine's settings are its own.",
    ),
    (
        "The same 16-bit run at another stage",
        "Other losses: with one micro-batch stage 0 differs from stages 1-3, with several nearly all differ.",
        "With one micro-batch the same bits at every stage; with several too if `reduce.when` is the same.",
    ),
)

GROUPS = (
    ("Accumulation and reduction", ACCUMULATION),
    ("Loss scale, norm and clipping", SCALING),
    ("Weights, masters and stages", WEIGHTS),
)
