"""SFT as verl drives an engine, with zerodrift's or in plain torch; started by torchrun.

    torchrun --nproc-per-node=2 tests/e2e/verl_loop.py FOLDER STAGE DTYPE

Trains three steps of two micro-batches, hands weights to a sampler, saves, goes on, loads and goes on
again. The results are in FOLDER/told.json.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VERL_USE_EXTERNAL_MODULES": "zerodrift.verl", "VERL_ENGINE_DEVICE": "cpu"}
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import sft_loss

from zerodrift.errors import UnsupportedError
from zerodrift.verl import ZeroDriftEngineConfig, digests_of, require_same

STEPS, RATE, CLIP = 3, 1e-3, 0.5


def rows(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the tokens and the loss mask of the eight samples of a step."""
    made = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 12, (8,), generator=made).tolist()
    tokens = [torch.randint(3, 64, (length,), generator=made) for length in lengths]
    return [(one, (torch.arange(len(one)) >= 2).long()) for one in tokens]


def batch(step: int, rank: int) -> Any:
    mine = rows(step)[4 * rank : 4 * rank + 4]
    nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    tensors = {
        "input_ids": nested([tokens for tokens, _ in mine]),
        "position_ids": nested([torch.arange(len(tokens)) for tokens, _ in mine]),
        "loss_mask": nested([mask for _, mask in mine]),
    }
    said = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "use_remove_padding": False}
    return tensordict_utils.get_tensordict(tensors, {**said, "temperature": 1.0, "pad_token_id": 0})


def plain(path: str) -> list[float]:
    """Return the losses of the same steps in torch, in fp32, on one rank."""
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    losses = []
    for step in range(STEPS):
        count = sum(int(mask[1:].sum()) for _, mask in rows(step))
        total = 0.0
        for tokens, mask in rows(step):
            logits = model(tokens[None]).logits[0, :-1].log_softmax(-1)
            picked = logits.gather(1, tokens[1:, None]).squeeze(1)
            loss = -(picked * mask[1:]).sum() / count
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def make_engine(path: str, stage: int, dtype: str, kind: str = "language_model", **more: Any) -> Any:
    """Make an engine that trains; a critic is only evaluated."""
    model = HFModelConfig(
        model_type=kind,
        path=path,
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
        use_remove_padding=False,
        **more,
    )
    config = {"zero_optimization": {"stage": stage}, "precision": {"export": dtype}}
    engine = EngineRegistry.new(
        kind,
        "zerodrift",
        model_config=model,
        engine_config=ZeroDriftEngineConfig(
            config=config,
            dtype=dtype,
            pins=["*norm.weight"],
            quiet=True,
            use_dynamic_bsz=False,
            forward_only=kind != "language_model",
        ),
        optimizer_config=FSDPOptimizerConfig(lr=RATE, clip_grad=CLIP, total_training_steps=10),
        checkpoint_config=CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def step(engine: Any, number: int) -> dict[str, float]:
    loss = functools.partial(sft_loss, config=None)
    with engine.train_mode():
        told = engine.train_batch(batch(number, engine.rank), loss)
        rate = engine.lr_scheduler_step()
    mine = torch.tensor(sum(told["loss"]))
    torch.distributed.all_reduce(mine)
    return {"loss": mine.item() / 2, "norm": told["metrics"]["grad_norm"], "rate": rate}


def twice(engine: Any) -> list[float] | str:
    """Return the norms of a batch, and of the same one passed twice in a step; or the text of the error."""
    loss = functools.partial(sft_loss, config=None)
    norms = []
    try:
        with engine.train_mode():
            for calls in (1, 2):
                for _ in range(calls):
                    engine.forward_backward_batch(batch(9, engine.rank), loss)
                norms.append(engine.optimizer_step())
    except UnsupportedError as error:
        return str(error)
    return norms


def main() -> None:
    folder, stage, dtype = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    path = str(folder / "model")
    if rank == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
        LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)).save_pretrained(
            path
        )
    torch.distributed.barrier()
    engine = make_engine(path, stage, dtype)
    told: dict[str, Any] = {"steps": [step(engine, number) for number in range(STEPS)]}
    weights, adapter = engine.get_per_tensor_param()
    held = {name: value.clone() for name, value in weights}
    require_same(engine.sent, digests_of(held.items()))
    told |= {"dtypes": {name: str(value.dtype) for name, value in held.items()}, "adapter": adapter}
    told["names"] = sorted(LlamaForCausalLM.from_pretrained(path).state_dict()) == sorted(held)
    with engine.eval_mode():
        loss = functools.partial(sft_loss, config=None)
        seen = engine.infer_batch(batch(0, rank), loss)
    told["outputs"] = sorted(seen["model_output"])
    engine.save_checkpoint(str(folder / "saved"), global_step=STEPS)
    told["straight"] = [step(engine, number) for number in (3, 4)]
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    told["twice"] = twice(engine)
    again = make_engine(path, 0 if stage else 3, dtype)
    again.load_checkpoint(str(folder / "saved"))
    told["resumed"] = [step(again, number) for number in (3, 4)]
    again.engine.destroy()
    exported = load_file(folder / "saved" / "huggingface" / "model.safetensors")
    told["exported"] = exported.keys() == held.keys() and all(
        value.dtype is held[name].dtype and torch.equal(value, held[name]) for name, value in exported.items()
    )
    lora = make_engine(path, stage, dtype, lora_rank=4, target_modules=["q_proj", "v_proj"])
    told["lora"] = [step(lora, number)["loss"] for number in range(STEPS)]
    whole, adapter = lora.get_per_tensor_param()
    told["beneath"] = sorted(name for name, _ in whole)[-3:]
    parts, adapter = lora.get_per_tensor_param(base_sync_done=True)
    told["parts"] = sorted(name for name, _ in parts)[:2]
    told["rank"] = adapter["r"]
    critic = make_engine(path, stage, dtype, "value_model")
    with critic.eval_mode():
        values = critic.infer_batch(batch(0, rank))["model_output"]["values"]
    told["values"] = values.values().isfinite().sum().item()
    told["tokens"] = batch(0, rank)["input_ids"].values().numel()
    if rank == 0:
        told["plain"] = plain(path)
        (folder / "told.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
