"""Every method that three trainers have: the jobs of the second table of docs/doors.md.

`rank_server.py` runs them in the environment of the trainer, so nothing of zerodrift is imported here. Two
ranks, four steps, the models and data of `tiny.py`. Values are the trainers' own arguments.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Job:
    """One method of one kind of training: one command, or two where the second resumes."""

    kind: str
    method: str
    commands: tuple[Mapping[str, Any], ...]
    """Arguments, with `{data}`, `{stage}`, `{out}` and `{first}`, the folder of the first command."""
    form: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    """Makes the argument of the trainer's entry point from `arguments` and the values of these names."""

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.method}".replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Trainer:
    """One package and its jobs."""

    shown: str
    jobs: Sequence[Job]


# --- LLaMA-Factory --------------------------------------------------------------------------------------


def _llamafactory(arguments: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    formed = {**_LLAMAFACTORY, **arguments}
    return {key: value.format(**names) if isinstance(value, str) else value for key, value in formed.items()}


_LLAMAFACTORY = {
    "model_name_or_path": "{data}/model",
    "do_train": True,
    "deepspeed": "{data}/any{stage}.json",
    "dataset_dir": "{data}",
    "template": "default",
    "cutoff_len": 64,
    "output_dir": "{out}",
    "logging_steps": 1,
    "max_steps": 4,
    "save_strategy": "no",
    "report_to": "none",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "disable_gradient_checkpointing": True,
    "overwrite_cache": True,
}
_LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"}
_FULL = {"finetuning_type": "full"}
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "pt": {"dataset": "text"},
    "sft": {"dataset": "alpaca"},
    "rm": {"dataset": "pairs"},
    "dpo": {"dataset": "pairs", "pref_beta": 0.1},
    "kto": {"dataset": "marked"},
    "ppo": {"dataset": "alpaca", "reward_model": "{data}/reward", "reward_model_type": "full",
            "max_new_tokens": 8, "do_sample": False, "ppo_buffer_size": 1},
}  # fmt: skip
_METHODS: Mapping[str, Mapping[str, Any]] = {
    "full": _FULL,
    "freeze": {"finetuning_type": "freeze", "freeze_trainable_layers": 1},
    "LoRA": _LORA,
    "DoRA": {**_LORA, "use_dora": True},
}
_EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "val_size": 0.25, "per_device_eval_batch_size": 2}
_SAVED = {"save_strategy": "steps", "save_steps": 2}
_SFT_FULL: Mapping[str, Mapping[str, Any]] = {
    "packing": {"packing": True},
    "neat packing": {"neat_packing": True, "flash_attn": "sdpa"},
    "evaluation": _EVALUATED,
    "accuracy": {**_EVALUATED, "compute_accuracy": True},
    "generation in evaluation": {**_EVALUATED, "predict_with_generate": True},
    "best model at end": {**_EVALUATED, **_SAVED, "load_best_model_at_end": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "activation checkpointing": {"disable_gradient_checkpointing": False},
    "bf16": {"bf16": True, "use_cpu": True},
    "NEFTune": {"neftune_noise_alpha": 5.0},
    "DFT loss": {"use_dft_loss": True},
    "EAFT loss": {"use_eaft_loss": True},
    "ASFT loss": {"use_asft_loss": True},
    "resized vocabulary": {"resize_vocab": True, "add_tokens": "new_word"},
    "GaLore": {"use_galore": True, "galore_target": "all", "galore_rank": 4},
    "APOLLO": {"use_apollo": True, "apollo_target": "all", "apollo_rank": 4},
    "BAdam by layer": {"use_badam": True, "badam_mode": "layer", "badam_switch_interval": 2},
    "BAdam by ratio": {"use_badam": True, "badam_mode": "ratio"},
    "Adam-mini": {"use_adam_mini": True},
    "Muon": {"use_muon": True},
    "optim adafactor": {"optim": "adafactor"},
    "optim sgd": {"optim": "sgd"},
}
_SFT_LORA: Mapping[str, Mapping[str, Any]] = {
    "rsLoRA on all": {"lora_target": "all", "use_rslora": True},
    "LoRA+": {"loraplus_lr_ratio": 16.0},
    "PiSSA": {"pissa_init": True},
    "LoRA with whole modules": {"additional_target": "embed_tokens,lm_head"},
    "LoRA with evaluation": _EVALUATED,
}
_DPO: Mapping[str, Mapping[str, Any]] = {
    **{loss: {"pref_loss": loss} for loss in ("hinge", "ipo", "kto_pair", "orpo", "simpo")},
    "reference model": {"ref_model": "{data}/model"},
    "evaluation": _EVALUATED,
}


def _resumed(kind: str, method: str, arguments: Mapping[str, Any], form: Any, key: str) -> Job:
    """Return a training in one command, and the same one resumed at its second step in another."""
    first = {**arguments, **_SAVED}
    return Job(kind, method, (first, {**first, key: "{first}/checkpoint-2"}), form)


def _of_llamafactory() -> list[Job]:
    def arguments(kind: str, more: Mapping[str, Any]) -> dict[str, Any]:
        return {"stage": kind, **_KINDS[kind], **more}

    jobs = [
        Job(kind, method, (arguments(kind, more),), _llamafactory)
        for kind in _KINDS
        for method, more in _METHODS.items()
    ]
    for method, more in (
        *((name, {**_FULL, **more}) for name, more in _SFT_FULL.items()),
        *((name, {**_LORA, **more}) for name, more in _SFT_LORA.items()),
        (
            "OFT",
            {"finetuning_type": "oft", "oft_block_size": 4, "oft_rank": 0, "oft_target": "q_proj,v_proj"},
        ),
        ("LLaMA-Pro", {**_METHODS["freeze"], "use_llama_pro": True}),
        ("save_only_model", {**_FULL, **_SAVED, "save_only_model": True}),
    ):
        jobs.append(Job("sft", method, (arguments("sft", more),), _llamafactory))
    for method, more in _DPO.items():
        jobs.append(Job("dpo", method, (arguments("dpo", {**_FULL, **more}),), _llamafactory))
    for pair in ("sft full", "sft LoRA", "sft freeze", "rm full", "dpo LoRA"):
        kind, method = pair.split()
        more = arguments(kind, _METHODS[method])
        jobs.append(_resumed(kind, f"{method} resumed", more, _llamafactory, "resume_from_checkpoint"))
    return jobs


# --- ms-swift -------------------------------------------------------------------------------------------


def _swift(arguments: Mapping[str, Any], names: Mapping[str, Any]) -> list[str]:
    verb, formed = arguments["verb"], {**_SWIFT, **arguments}
    del formed["verb"]
    words = [part for key, value in formed.items() for part in (f"--{key}", str(value).format(**names))]
    return [verb, *words]


_SWIFT = {
    "model": "{data}/model",
    "model_type": "llama",
    "template": "default",
    "dataset_shuffle": "false",
    "max_steps": 4,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 4,
    "save_only_model": "true",
    "add_version": "false",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "torch_dtype": "float32",
    "fp16": "false",
    "bf16": "false",
    "learning_rate": 1e-3,
    "max_length": 256,
    "gradient_checkpointing": "false",
    "report_to": "none",
    "dataloader_num_workers": 0,
    "check_model": "false",
    "use_cpu": "true",
    "deepspeed": "{data}/any{stage}.json",
    "output_dir": "{out}",
}
_SWIFT_KINDS: Mapping[str, Mapping[str, Any]] = {
    "pt": {"verb": "pt", "dataset": "{data}/chats/train.jsonl"},
    "sft": {"verb": "sft", "dataset": "{data}/chats/train.jsonl"},
    "rm": {"verb": "rlhf", "rlhf_type": "rm", "dataset": "{data}/dialogues/train.jsonl"},
    "dpo": {"verb": "rlhf", "rlhf_type": "dpo", "dataset": "{data}/dialogues/train.jsonl"},
    "orpo": {"verb": "rlhf", "rlhf_type": "orpo", "dataset": "{data}/dialogues/train.jsonl"},
    "simpo": {"verb": "rlhf", "rlhf_type": "simpo", "dataset": "{data}/dialogues/train.jsonl"},
    "cpo": {"verb": "rlhf", "rlhf_type": "cpo", "dataset": "{data}/dialogues/train.jsonl"},
    "kto": {"verb": "rlhf", "rlhf_type": "kto", "dataset": "{data}/rated/train.jsonl"},
    "gkd": {"verb": "rlhf", "rlhf_type": "gkd", "dataset": "{data}/chats/train.jsonl",
            "teacher_model": "{data}/model", "teacher_model_type": "llama", "max_completion_length": 8},
}  # fmt: skip
_SWIFT_LORA = {"tuner_type": "lora", "lora_rank": 4}
_SWIFT_FULL = {"tuner_type": "full"}
_SWIFT_EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "split_dataset_ratio": 0.25}
_SWIFT_SAVED = {"save_steps": 2, "save_only_model": "false"}
_SWIFT_SFT: Mapping[str, Mapping[str, Any]] = {
    "DoRA": {**_SWIFT_LORA, "use_dora": "true"},
    "freeze": {**_SWIFT_FULL, "freeze_parameters_ratio": 0.5},
    "LoRA with whole modules": {**_SWIFT_LORA, "modules_to_save": "embed_tokens"},
    "packing": {**_SWIFT_FULL, "packing": "true", "attn_impl": "eager"},
    "padding free": {**_SWIFT_FULL, "padding_free": "true", "attn_impl": "eager"},
    "evaluation": {**_SWIFT_FULL, **_SWIFT_EVALUATED},
    "LoRA with evaluation": {**_SWIFT_LORA, **_SWIFT_EVALUATED},
    "accumulation": {**_SWIFT_FULL, "gradient_accumulation_steps": 2},
    "activation checkpointing": {**_SWIFT_FULL, "gradient_checkpointing": "true"},
    "bf16": {**_SWIFT_FULL, "bf16": "true"},
    "NEFTune": {**_SWIFT_FULL, "neftune_noise_alpha": 5},
}


def _of_swift() -> list[Job]:
    jobs = [
        Job(kind, method, ({**more, **tuner},), _swift)
        for kind, more in _SWIFT_KINDS.items()
        for method, tuner in (("full", _SWIFT_FULL), ("LoRA", _SWIFT_LORA))
    ]
    jobs += [
        Job("sft", name, ({**_SWIFT_KINDS["sft"], **more},), _swift) for name, more in _SWIFT_SFT.items()
    ]
    for kind, method, tuner in (("sft", "full", _SWIFT_FULL), ("sft", "LoRA", _SWIFT_LORA),
                                ("dpo", "full", _SWIFT_FULL)):  # fmt: skip
        more = {**_SWIFT_KINDS[kind], **tuner, **_SWIFT_SAVED}
        jobs.append(_resumed(kind, f"{method} resumed", more, _swift, "resume_from_checkpoint"))
    return jobs


# --- Axolotl --------------------------------------------------------------------------------------------


def _axolotl(arguments: Mapping[str, Any], names: Mapping[str, Any]) -> str:
    """Write the arguments into Axolotl's config file, and return its path."""
    path = Path(str(names["out"])) / "axolotl.yaml"
    text = json.dumps({**_AXOLOTL, **arguments})
    for name, value in names.items():
        text = text.replace(f"{{{name}}}", str(value))
    path.write_text(text)
    return str(path)


_AXOLOTL: Mapping[str, Any] = {
    "base_model": "{data}/model",
    "dataset_prepared_path": "{out}/prepared",
    "output_dir": "{out}",
    "deepspeed": "{data}/any{stage}.json",
    "max_memory": {"cpu": "8GiB"},
    "sequence_len": 256,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 4,
    "optimizer": "adamw_torch",
    "lr_scheduler": "cosine",
    "learning_rate": 1e-3,
    "bf16": False,
    "fp16": False,
    "tf32": False,
    "logging_steps": 1,
    "save_steps": 4,
    "save_only_model": True,
    "val_set_size": 0,
    "attn_implementation": "sdpa",
    "special_tokens": {"pad_token": "<pad>"},
    "seed": 42,
}
_ALPACA = {"path": "{data}/alpaca/train.jsonl", "ds_type": "json", "type": "alpaca"}
_PAIRS = {"path": "{data}/pairs/train.jsonl", "ds_type": "json", "split": "train", "type": {
    "field_prompt": "prompt", "field_chosen": "chosen", "field_rejected": "rejected",
    "prompt_format": "{prompt}", "chosen_format": "{chosen}",
    "rejected_format": "{rejected}"}}  # fmt: skip
_MARKED = {"path": "{data}/marked/train.jsonl", "ds_type": "json", "split": "train", "type": {
    "field_prompt": "prompt", "field_completion": "completion", "field_label": "label",
    "prompt_format": "{prompt}", "completion_format": "{completion}"}}  # fmt: skip
_AXOLOTL_KINDS: Mapping[str, Mapping[str, Any]] = {
    "pt": {"datasets": [{"path": "{data}/text/train.jsonl", "ds_type": "json", "type": "completion"}]},
    "sft": {"datasets": [_ALPACA]},
    "rm": {"reward_model": True, "num_labels": 1, "model_type": "AutoModelForSequenceClassification",
           "chat_template": "tokenizer_default", "datasets": [{
               "path": "{data}/whole_turns/train.jsonl", "ds_type": "json",
               "type": "bradley_terry.chat_template"}]},
    "dpo": {"rl": "dpo", "datasets": [_PAIRS]},
    "orpo": {"rl": "orpo", "chat_template": "tokenizer_default", "datasets": [{
        "path": "{data}/argilla/train.jsonl", "ds_type": "json", "type": "chat_template.argilla"}]},
    "simpo": {"rl": "simpo", "rl_beta": 0.1, "simpo_gamma": 0.5, "datasets": [_PAIRS]},
    "kto": {"rl": "kto", "remove_unused_columns": False, "datasets": [_MARKED]},
}  # fmt: skip
_AXOLOTL_LORA = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
    "lora_model_dir": "{data}/adapter",
}
_AXOLOTL_SFT: Mapping[str, Mapping[str, Any]] = {
    "freeze": {"unfrozen_parameters": ["model.layers.1.*", "lm_head.*"]},
    "DoRA": {**_AXOLOTL_LORA, "peft_use_dora": True, "lora_model_dir": "{data}/dora"},
    "packing": {"sample_packing": True, "pad_to_sequence_len": True},
    "evaluation": {"val_set_size": 0.25, "eval_steps": 2},
    "LoRA with evaluation": {**_AXOLOTL_LORA, "val_set_size": 0.25, "eval_steps": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
    "activation checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
    "GaLore": {"optimizer": "galore_adamw", "optim_target_modules": ["attn", "mlp"]},
    "Muon": {"optimizer": "muon"},
    "NEFTune": {"neftune_noise_alpha": 5},
}


def _of_axolotl() -> list[Job]:
    jobs = [
        Job(kind, method, ({**more, **adapter},), _axolotl)
        for kind, more in _AXOLOTL_KINDS.items()
        for method, adapter in (("full", {}), ("LoRA", _AXOLOTL_LORA))
    ]
    for name, more in _AXOLOTL_SFT.items():
        jobs.append(Job("sft", name, ({**_AXOLOTL_KINDS["sft"], **more},), _axolotl))
    for kind, method, adapter in (("sft", "full", {}), ("sft", "LoRA", _AXOLOTL_LORA), ("dpo", "full", {})):
        more = {**_AXOLOTL_KINDS[kind], **adapter, "save_steps": 2, "save_only_model": False}
        resumed = {**more, "resume_from_checkpoint": "{first}/checkpoint-2"}
        jobs.append(Job(kind, f"{method} resumed", (more, resumed), _axolotl))
    return jobs


TRAINERS: Mapping[str, Trainer] = {
    "llamafactory": Trainer("LLaMA-Factory", _of_llamafactory()),
    "ms-swift": Trainer("ms-swift", _of_swift()),
    "axolotl": Trainer("Axolotl", _of_axolotl()),
}
