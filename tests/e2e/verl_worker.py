"""verl's own workers over zerodrift's engine, and over verl's fsdp2; started by torchrun on two ranks.

    torchrun --nproc-per-node=2 tests/e2e/verl_worker.py FOLDER

The results are in FOLDER/told.json: those of each engine, by case.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "doors" / "on_cpu"))
os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,zerodrift.verl", "VERL_ENGINE_DEVICE": "cuda"}
os.environ |= {"VERL_USE_EXTERNAL_PLUGINS": "none", "HF_HUB_OFFLINE": "1"}

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tensordict.tensorclass import NonTensorData
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss
from verl.workers.utils.padding import no_padding_2_padding

from zerodrift.errors import ZerodriftError
from zerodrift.verl import ZeroDriftEngineConfig, digests_of, require_same

SAMPLES, RESPONSE, CLIP = 4, 6, 0.5
"""Samples per rank; the longest answer in tokens; the norm at which gradients are clipped."""
SFT = functools.partial(sft_loss, config=None)
CASES: dict[str, Callable[[Path, int], Any]] = {}


def case(make: Callable[[Path, int], Any]) -> Callable[[Path, int], Any]:
    CASES[make.__name__] = make
    return make


# --- what is trained on ---------------------------------------------------------------------------------


def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


def samples(seed: int, rank: int, **said: Any) -> Any:
    """Return packed prompts with answers, and the inputs of a policy's and a critic's loss."""
    made = torch.Generator().manual_seed(100 * seed + rank)
    prompts = [torch.randint(3, 64, (3 + i % 3,), generator=made) for i in range(SAMPLES)]
    answers = [torch.randint(3, 64, (RESPONSE - i % 4,), generator=made) for i in range(SAMPLES)]
    whole = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    counts = torch.arange(RESPONSE)[None] < torch.tensor([len(answer) for answer in answers])[:, None]
    tensors = {
        "input_ids": nested(whole),
        "position_ids": nested([torch.arange(len(one)) for one in whole]),
        "prompts": nested(prompts),
        "responses": nested(answers),
        "response_mask": counts,
        "loss_mask": counts,
    }
    for name in ("advantages", "returns", "values"):
        tensors[name] = torch.randn(SAMPLES, RESPONSE, generator=made)
    how = {
        "temperature": 1.0,
        "pad_token_id": 0,
        "global_batch_size": 2 * SAMPLES,
        "max_response_len": RESPONSE,
        "use_remove_padding": False,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "max_token_len_per_gpu": 12,
    }
    data = tensordict_utils.get_tensordict(tensors, how | said)
    lengths = [len(one) for one in whole]
    tensordict_utils.assign_non_tensor(
        data, global_token_num=NonTensorData(lengths), update_lr_scheduler=True
    )
    return data


def chats(seed: int, rank: int, **said: Any) -> Any:
    """Return a batch for SFT, whose mask goes over all tokens."""
    data = samples(seed, rank, **said)
    lengths = zip(data["prompts"].offsets().diff(), data["input_ids"].offsets().diff(), strict=True)
    data["loss_mask"] = nested([(torch.arange(int(of)) >= prompt).long() for prompt, of in lengths])
    return data


# --- who trains -----------------------------------------------------------------------------------------


def worker(
    path: Path,
    strategy: str = "zerodrift",
    kind: str = "language_model",
    dtype: str = "float32",
    config: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    loss: Callable[..., Any] | None = None,
    **model: Any,
) -> TrainingWorker:
    if strategy == "zerodrift":
        keys: Any = {"zero_optimization": {"stage": 3}} if config is None else config
        engine: Any = ZeroDriftEngineConfig(config=keys, dtype=dtype, quiet=True)
    else:
        mixed = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), dtype)
        engine = FSDPEngineConfig(strategy=strategy, mixed_precision=mixed, use_torch_compile=False)
    model |= {"override_config": {"attn_implementation": "sdpa"}, "use_remove_padding": False}
    steps = {"lr": 1e-3, "clip_grad": CLIP, "total_training_steps": 10} | (optim or {})
    made = TrainingWorker(
        TrainingWorkerConfig(
            model_type=kind,
            model_config=HFModelConfig(path=str(path), load_tokenizer=False, **model),
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(**steps),
            checkpoint_config=CheckpointConfig(**(checkpoint or {})),
        )
    )
    made.reset()
    if loss is not None:
        made.set_loss_fn(loss)
    return made


def metrics(output: Any, *more: str) -> dict[str, float]:
    """Return loss, norm and learning rate of a batch, and others by name."""
    found = tensordict_utils.get(output, "metrics")
    names = [name for name in ("loss", "grad_norm", "lr", *more) if name in found]
    return {name: number(found[name]) for name in names}


def number(value: Any) -> float:
    if isinstance(value, list):
        return sum(map(number, value)) / len(value)
    return float(getattr(value, "values", value) if not hasattr(value, "aggregate") else value.aggregate())


def end(made: TrainingWorker) -> None:
    if hasattr(made.engine, "engine"):
        made.engine.engine.destroy()


def both(train: Callable[[str], Any]) -> dict[str, Any]:
    return {strategy: train(strategy) for strategy in ("zerodrift", "fsdp2")}


# --- the cases ------------------------------------------------------------------------------------------


@case
def sft(folder: Path, rank: int) -> Any:
    """Train two steps, packed and padded, in micro-batches by count and by tokens."""

    def train(strategy: str) -> Any:
        cosine = {"lr_scheduler_type": "cosine", "lr_warmup_steps": 3}
        made = worker(folder / "model", strategy, optim=cosine, loss=SFT)
        found = {}
        for packed in (False, True):
            for dynamic in (False, True):
                said = {"use_remove_padding": packed, "use_dynamic_bsz": dynamic}
                steps = [metrics(made.train_batch(chats(seed, rank, **said))) for seed in (1, 2)]
                steps.append(metrics(made.infer_batch(chats(3, rank, **said))))
                found[f"packed {packed}, dynamic {dynamic}"] = steps
                end(made)
                made.reset()
        end(made)
        return found

    return both(train)


@case
def twice(folder: Path, rank: int) -> Any:
    """Return the norms of a batch, and of the same one passed twice in a step; at stage 1 the error."""
    found: list[Any] = []
    for stage in (3, 1):
        config = {"zero_optimization": {"stage": stage}}
        made = worker(folder / "model", config=config, optim={"lr": 0.0}, loss=SFT)
        try:
            with made.engine.train_mode():
                for calls in (1, 2):
                    for _ in range(calls):
                        made.engine.forward_backward_batch(chats(9, rank), SFT)
                    found.append(made.engine.optimizer_step())
        except ZerodriftError as error:
            found.append(str(error))
        end(made)
    return found


def policy() -> Any:
    how = {"ppo_micro_batch_size_per_gpu": 2, "entropy_coeff": 0.01, "calculate_entropy": True}
    config = ActorConfig(strategy="zerodrift", rollout_n=1, **how)
    return functools.partial(ppo_loss, config=config)


def as_policy(made: TrainingWorker, data: Any) -> Any:
    """Add the log-probabilities of the untrained policy to a batch."""
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True, compute_loss=False)
    seen = made.infer_batch(data.copy())
    data["old_log_probs"] = no_padding_2_padding(seen["log_probs"], data)
    return data, seen


@case
def ppo(folder: Path, rank: int) -> Any:
    """Train two updates by one batch: the first sees no change of the policy, the second does."""

    def train(strategy: str) -> Any:
        made = worker(folder / "model", strategy, loss=policy())
        data, seen = as_policy(made, samples(1, rank, temperature=0.7))
        entropy = seen["entropy"].values().double().mean().item()
        names = ("actor/ppo_kl", "actor/pg_clipfrac", "actor/entropy_loss")
        steps = [metrics(made.train_batch(data.copy()), *names) for _ in range(2)]
        end(made)
        return {"steps": steps, "entropy": entropy}

    return both(train)


@case
def bits(folder: Path, rank: int) -> Any:
    """Compare log-probabilities before training with those in training, to the bit, and in fp32."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        made = worker(folder / "model", dtype=dtype, enable_gradient_checkpointing=dtype == "bfloat16")
        for packed in (False, True):
            data, before = as_policy(made, samples(1, rank, temperature=0.7, use_remove_padding=packed))
            tensordict_utils.assign_non_tensor(data, return_model_output=True)
            with made.engine.train_mode():
                during = made.engine.forward_backward_batch(data, policy())["model_output"]
            names = ("log_probs", "entropy")
            kinds = {str(during[name].dtype) for name in names}
            same = [torch.equal(before[name].values(), during[name].values()) for name in names]
            found[f"{dtype}, packed {packed}"] = [sorted(kinds), same]
        end(made)
    return found


@case
def critic(folder: Path, rank: int) -> Any:
    """Train a critic for a step, on the engine and in plain torch on one rank."""
    config = CriticConfig(strategy="zerodrift", ppo_micro_batch_size_per_gpu=2)
    loss = functools.partial(value_loss, config=config)
    made = worker(folder / "critic", kind="value_model", loss=loss)
    steps = [metrics(made.train_batch(samples(seed, rank)), "critic/vpred_mean") for seed in (1, 2)]
    found = {"zerodrift": steps, "plain": []}
    end(made)
    model = LlamaForTokenClassification.from_pretrained(folder / "critic", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for seed in (1, 2):
        total = 0.0
        batches = [samples(seed, other) for other in range(2)]
        tokens = sum(int(data["response_mask"].sum()) for data in batches)
        for data in batches:
            tensordict_utils.assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens)
            values = [model(one[None]).logits[0, :, 0] for one in data["input_ids"].unbind()]
            part, _ = loss(model_output={"values": nested(values)}, data=data)
            part.backward()
            total += part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        optimizer.step()
        optimizer.zero_grad()
        found["plain"].append({"loss": total, "grad_norm": norm})
    return found


@case
def adapter(folder: Path, rank: int) -> Any:
    """Train an adapter, switch it off for the reference, and export it separately."""
    made = worker(folder / "model", lora_rank=4, target_modules=["q_proj", "v_proj"], loss=policy())
    data, first = as_policy(made, samples(1, rank))
    losses = [metrics(made.train_batch(data.copy()))["loss"] for _ in range(3)]
    tensordict_utils.assign_non_tensor(data, no_lora_adapter=True)
    without = made.infer_batch(data.copy())
    _, after = as_policy(made, samples(1, rank))
    parts, _ = made.engine.get_per_tensor_param(base_sync_done=True)
    names = sorted(name for name, _ in parts)
    end(made)
    return {
        "losses": losses,
        "without": torch.equal(without["log_probs"].values(), first["log_probs"].values()),
        "with": torch.equal(after["log_probs"].values(), first["log_probs"].values()),
        "names": names,
    }


@case
def sampler(folder: Path, rank: int) -> Any:
    """Export weights in training, under the names and in the dtypes of the model's folder."""
    config = {"zero_optimization": {"stage": 3}, "precision": {"export": "bf16"}}
    config["precision"]["rules"] = [{"match": "*.mlp.gate.*", "pin": "fp32"}]
    made = worker(folder / "experts", dtype="bfloat16", config=config, loss=SFT)
    made.train_batch(chats(1, rank))
    held = dict(made.engine.get_per_tensor_param()[0])
    made.train_batch(chats(2, rank))
    require_same(made.engine.sent, digests_of(held.items()))
    weights, _ = made.engine.get_per_tensor_param()
    next(weights)
    made.train_batch(chats(3, rank))
    try:
        next(weights)
        said = ""
    except ZerodriftError as error:
        said = str(error)
    end(made)
    with safe_open(folder / "experts" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    routers = {str(value.dtype) for name, value in held.items() if ".mlp.gate." in name}
    others = {str(value.dtype) for name, value in held.items() if ".mlp.gate." not in name}
    return {
        "names": sorted(names ^ set(held)),
        "kinds": [*routers, *others],
        "said": said,
    }


@case
def places(folder: Path, rank: int) -> Any:
    """Save and load the contents of verl's config."""
    whole = {"save_contents": ["model", "optimizer", "extra", "hf_model"]}
    made = worker(folder / "model", checkpoint=whole, loss=SFT)
    made.train_batch(chats(1, rank))
    for number in (1, 2, 3):
        made.save_checkpoint(str(folder / f"saved/global_step_{number}"), None, number, 2)
    held = dict(made.engine.get_per_tensor_param()[0])
    exported = load_file(folder / "saved/global_step_3/huggingface/model.safetensors")
    same = {name: torch.equal(exported[name], value) for name, value in held.items()}
    straight = metrics(made.train_batch(chats(2, rank)))
    end(made)
    again = worker(folder / "model", config={"zero_optimization": {"stage": 1}}, loss=SFT)
    again.load_checkpoint(str(folder / "saved/global_step_3"))
    resumed = metrics(again.train_batch(chats(2, rank)))
    alone = worker(folder / "model", checkpoint={"save_contents": ["hf_model"]})
    alone.save_checkpoint(str(folder / "alone"), None, 1, None)
    lora = {"lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}
    parts = worker(folder / "model", checkpoint=whole | {"save_lora_only": True}, **lora, loss=SFT)
    parts.train_batch(chats(1, rank))
    parts.save_checkpoint(str(folder / "parts"), None, 1, None)
    there = metrics(parts.infer_batch(chats(2, rank)))
    parts.engine.engine.destroy()
    parts.reset()
    parts.load_checkpoint(str(folder / "parts"))
    back = metrics(parts.infer_batch(chats(2, rank)))
    for one in (again, alone, parts):
        end(one)
    return {
        "exported": exported.keys() == held.keys() and all(same.values()),
        "straight": straight,
        "resumed": resumed,
        "kept": sorted(path.name for path in (folder / "saved").iterdir()),
        "alone": sorted(path.name for path in (folder / "alone").iterdir()),
        "files": sorted(path.name for path in (folder / "alone" / "huggingface").iterdir()),
        "parts": [there["loss"], back["loss"]],
        "bytes": [size(folder / "parts"), size(folder / "saved/global_step_3/state")],
    }


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- all of them ----------------------------------------------------------------------------------------


def write_models(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder / "model")
    critic = LlamaForTokenClassification(LlamaConfig(**sizes, **heads, num_labels=1))
    critic.save_pretrained(folder / "critic")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts)).save_pretrained(folder / "experts")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    if rank == 0:
        write_models(folder)
    torch.distributed.barrier()
    told = {name: run(folder, rank) for name, run in CASES.items() if name in (sys.argv[2:] or CASES)}
    if rank == 0:
        (folder / "told.json").write_text(json.dumps(told))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
