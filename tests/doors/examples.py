"""The examples of each tool for the table of docs/doors.md: packages, commands and their files.

Two CPU ranks, models of two small layers, data made by `tiny.py`. `tools/door_examples.py` runs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEEPSPEED = "deepspeed==0.19.6"
TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Example:
    """One command of a tool."""

    name: str
    command: str
    """Words that spaces separate, with `{tests}`, `{data}`, `{out}`, `{stage}`, `{port}`."""
    file: str = ""
    """A YAML that the command takes as `{file}`."""
    beside: str = ""
    """The command on DeepSpeed, if that is another one."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A package, with the packages that its environment needs."""

    shown: str
    package: str
    """Package of the table's version."""
    packages: tuple[str, ...]
    """Packages beside torch, zerodrift and DeepSpeed."""
    examples: tuple[Example, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """Requirements that are left out; PyPI's cannot be imported with torch for CPUs."""
    empty: tuple[str, ...] = ()
    """Modules of these packages that are imported all the same, from empty stand-ins."""
    without: str = ""
    """Examples that fail, or were not tried."""


TORCHRUN = "torchrun --nproc-per-node=2 --master-port {port}"
ON_DEEPSPEED = TORCHRUN + " {tests}/e2e/on_deepspeed.py"
HF = (
    "--max_steps 3 --logging_steps 1 --save_steps 3 --per_device_train_batch_size 2 --learning_rate 1e-3 "
    "--report_to none --use_cpu --output_dir {out}"
)
TRL = f"{HF} --model_name_or_path {{data}}/model --dtype float32 --bf16 false --gradient_checkpointing false"
TRL_COMMAND = "trl {kind} --accelerate_config {file} --main_process_port {port} " + TRL
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
deepspeed_config: {{zero_stage: {stage}, gradient_accumulation_steps: {steps}, zero3_init_flag: false,
  offload_optimizer_device: none, offload_param_device: none, zero3_save_16bit_model: true}}
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""


def of_script(kind: str) -> Example:
    """Return an example of one of TRL's trainers."""
    script = f"{{tests}}/doors/trl_trainers.py {{out}} {kind}/{{stage}}"
    return Example(f"script: {kind}", f"{TORCHRUN} {script}")


def of_command(kind: str, data: str, more: str = "") -> Example:
    command = TRL_COMMAND.replace("{kind}", kind) + f" --dataset_name {{data}}/{data} {more}"
    return Example(f"`trl {kind}`", command, accelerate_config(1))


LLAMAFACTORY = """\
model_name_or_path: {data}/model
do_train: true
deepspeed: {data}/zero{stage}.json
dataset_dir: {data}
template: default
cutoff_len: 64
output_dir: {out}
logging_steps: 1
max_steps: 3
save_only_model: true
report_to: none
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1.0e-3
disable_gradient_checkpointing: true
"""
FULL = "finetuning_type: full\n"
LORA_OF_LLAMAFACTORY = "finetuning_type: lora\nlora_rank: 4\nlora_target: q_proj,v_proj\n"
LORA_OF_AXOLOTL = (
    "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_target_modules: [q_proj, v_proj]\n"
    "lora_model_dir: {data}/adapter\n"  # new ones have other values in every run
)
AXOLOTL_COMMAND = "axolotl train {file} --launcher torchrun -- --nproc-per-node 2 --master-port {port}"
AXOLOTL = """\
base_model: {data}/model
datasets: [{{path: {data}/alpaca/train.jsonl, ds_type: json, type: alpaca}}]
dataset_prepared_path: {out}/prepared
output_dir: {out}
deepspeed: {data}/zero{stage}.json
max_memory: {{cpu: 8GiB}}
sequence_len: 256
micro_batch_size: 2
gradient_accumulation_steps: 1
max_steps: 3
optimizer: adamw_torch
lr_scheduler: cosine
learning_rate: 0.001
bf16: false
fp16: false
tf32: false
logging_steps: 1
save_steps: 3
save_only_model: true
val_set_size: 0
attn_implementation: sdpa
special_tokens: {{pad_token: <pad>}}
seed: 42
"""
SWIFT = (
    "swift {kind} --model {data}/model --model_type llama --template default "
    "--dataset {data}/chats/train.jsonl --dataset_shuffle false "
    "--max_steps 3 --logging_steps 1 --save_steps 3 --per_device_train_batch_size 2 --torch_dtype float32 "
    "--fp16 false --bf16 false --learning_rate 1e-3 --max_length 256 --gradient_checkpointing false "
    "--report_to none --gradient_accumulation_steps 1 --dataloader_num_workers 0 --save_only_model true "
    "--check_model false --use_cpu true --deepspeed {data}/zero{stage}.json --output_dir {out}"
)
LOOP = "{tests}/e2e/deepspeed_scripts/plain.py --deepspeed --deepspeed_config {file} --out {out}/told.json"
LOOP_CONFIG = """\
{{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
 "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2, "torch_adam": true}}}},
 "scheduler": {{"type": "WarmupLR", "params": {{"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}}},
 "zero_optimization": {{"stage": {stage}}}}}
"""
LAUNCHER = "deepspeed --num_gpus 2 --master_port {port}"
LIGHTNING = "{tests}/e2e/lightning_loops.py {out} {stage}/32-true"
CLM = (
    "{tests}/doors/run_clm.py --model_name_or_path {data}/model --train_file {data}/text/train.jsonl "
    "--deepspeed {data}/zero{stage}.json " + HF
)


def nlp(name: str) -> str:
    launch = "accelerate launch --config_file {file} --main_process_port {port}"
    return f"{launch} {{tests}}/doors/{name}.py --model {{data}}/model --out {{out}}"


def accelerate_config(steps: int) -> str:
    return ACCELERATE.replace("{steps}", str(steps))


TOOLS: Mapping[str, Tool] = {
    "trl": Tool(
        "TRL",
        "trl",
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft"),
        (
            *map(of_script, ("sft", "lora", "dpo", "kto", "reward", "grpo", "rloo", "gkd")),
            of_command("sft", "chats", "--max_length 64"),
            of_command("dpo", "pairs", "--max_length 64"),
            of_command("kto", "marked", "--max_length 64"),
            of_command("reward", "whole", "--max_length 64"),
        ),
        without="adapters that are merged for vLLM at stage 3: writing inside `GatheredParameters` without "
        "`modifier_rank` is an error; `precompute_ref_log_probs` at stage 3, for which TRL hashes weights "
        "that are in pieces: an error here, and on DeepSpeed one hash for all weights",
    ),
    "transformers": Tool(
        "transformers `Trainer`",
        "transformers",
        ("transformers==5.23.0", "accelerate==1.15.0", "datasets"),
        (Example("`run_clm`-like", f"{TORCHRUN} {CLM}"),),
        without="`evaluate` before `train` at stage 3, on DeepSpeed neither: `Trainer` destroys its engine "
        "when `train` begins; pass `eval_on_start=True`",
    ),
    "accelerate": Tool(
        "accelerate",
        "accelerate",
        ("accelerate==1.15.0", "transformers==5.23.0"),
        (
            Example("`nlp_example`-like", nlp("nlp_example"), accelerate_config(1)),
            Example("`complete_nlp_example`-like", nlp("complete_nlp_example"), accelerate_config(2)),
        ),
        without="several machines through its `deepspeed` launcher; sequence parallelism",
    ),
    "deepspeed": Tool(
        "DeepSpeedExamples-like loop",
        "deepspeed",
        (),
        (
            Example("`torchrun`", f"{TORCHRUN} {LOOP}", LOOP_CONFIG),
            Example("`deepspeed`", f"{LAUNCHER} {LOOP}", LOOP_CONFIG, f"{TORCHRUN} {LOOP}"),
        ),
        without="several machines through its launcher: `zerodrift run -- torchrun --nnodes ...` on each; "
        "autotuning; elastic training",
    ),
    "lightning": Tool(
        "Lightning `Trainer` and Fabric",
        "lightning",
        ("lightning==2.6.6",),
        (
            Example(
                "script: `Trainer` and Fabric",
                f"{TORCHRUN} {LIGHTNING}",
                beside=f"{ON_DEEPSPEED} {LIGHTNING}",
            ),
        ),
        without="offload to NVMe; Lightning's `convert_zero_checkpoint_to_fp32_state_dict`: use "
        "`zero_to_fp32.py` in the checkpoint; `WeightAveraging` at stage 3, which copies parameters that are "
        "not gathered; `save_checkpoint` after `validate` or `test`, which make another engine: save before",
    ),
    "llamafactory": Tool(
        "LLaMA-Factory",
        "llamafactory",
        (
            *("llamafactory==0.9.5", "adam-mini==1.1.1", "apollo-torch==1.0.3", "badam==1.4"),
            *("bitsandbytes", "galore-torch==1.0", "jieba", "nltk", "rouge-chinese"),
        ),
        tuple(
            Example(name, "llamafactory-cli train {file}", LLAMAFACTORY + more)
            for name, more in (
                ("SFT", "stage: sft\ndataset: alpaca\n" + FULL),
                ("pretraining", "stage: pt\ndataset: text\n" + FULL),
                ("DPO", "stage: dpo\ndataset: pairs\npref_beta: 0.1\n" + FULL),
                ("LoRA", "stage: sft\ndataset: alpaca\n" + LORA_OF_LLAMAFACTORY),
                ("reward model", "stage: rm\ndataset: pairs\nsave_steps: 2\n" + FULL),
            )
        ),
        {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"},
        unused=("torchvision", "torchaudio"),
        empty=("torchaudio",),
    ),
    "axolotl": Tool(
        "Axolotl",
        "axolotl",
        ("axolotl==0.19.0",),
        tuple(
            Example(name, AXOLOTL_COMMAND, AXOLOTL + more)
            for name, more in (("SFT", ""), ("LoRA", LORA_OF_AXOLOTL))
        ),
    ),
    "ms-swift": Tool(
        "ms-swift",
        "ms-swift",
        ("ms-swift==4.6.0", "msgspec"),
        (
            Example("`swift sft`", SWIFT.replace("{kind}", "sft") + " --tuner_type full"),
            Example("LoRA", SWIFT.replace("{kind}", "sft") + " --tuner_type lora --lora_rank 4"),
            Example("`swift pt`", SWIFT.replace("{kind}", "pt") + " --tuner_type full"),
        ),
        {"NPROC_PER_NODE": "2", "USE_HF": "1"},
    ),
}
