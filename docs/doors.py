"""Runs other people's trainers on zerodrift and beside it on DeepSpeed, for the table of docs/doors.md.

    python docs/doors.py all FOLDER [TOOL ...]     # or: make doors. Each tool in an environment of its own
    python docs/doors.py one PYTHON TOOL [NAME ...]  # with an interpreter that is set up; some examples
    python docs/doors.py page                      # writes the table anew

Two CPU ranks, a model of two small layers, data made here; nothing is downloaded but packages. Each command
runs at stages 2 and 3 under `zerodrift run`, and at stage 2 on DeepSpeed 0.19.6, whose sums in fp32 are those
of stage 3 too. `accelerate` is told that ranks on CPUs are ranks (`tests/doors/on_cpu`). Results are kept in
tests/doors/results.json.

Invariant: versions are what the environment says of itself, and losses are what the tool wrote.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "doors.md"
RESULTS = ROOT / "tests" / "doors" / "results.json"
SCRIPTS = ROOT / "tests" / "doors"
E2E = ROOT / "tests" / "e2e"
NEAR = 1e-6
"""Of fp32 losses; what is further apart is named."""
BEGIN, END = "<!-- doors -->\n", "<!-- end of doors -->\n"
DEEPSPEED = "deepspeed==0.19.6"


@dataclass(frozen=True, slots=True)
class Example:
    """One thing that a tool does."""

    name: str
    command: str
    """With `{data}`, `{out}`, `{stage}`, `{port}`."""
    file: str = ""
    """A YAML that the command takes as `{file}`."""
    beside: str = ""
    """The command on DeepSpeed, where it is another one."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A package, and what is installed for it."""

    shown: str
    package: str
    """Whose version the table shows."""
    packages: tuple[str, ...]
    examples: tuple[Example, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    empty: tuple[str, ...] = ()
    """Modules that are imported and not used here, and have no build for a CPU: empty ones stand for them."""
    without: str = ""
    """What does not work, or was not tried."""


TORCHRUN = "torchrun --nproc-per-node=2 --master-port {port}"
ON_DEEPSPEED = f"{TORCHRUN} {E2E}/on_deepspeed.py"
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
    """One of TRL's trainers."""
    script = f"{E2E}/trl_trainers.py {{out}} {kind}/{{stage}}"
    return Example(f"script: {kind}", f"{TORCHRUN} {script}", beside=f"{ON_DEEPSPEED} {script}")


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
LOOP = f"{E2E}/deepspeed_scripts/plain.py --deepspeed --deepspeed_config {{file}} --out {{out}}/told.json"
LOOP_CONFIG = """\
{{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0,
 "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-2, "torch_adam": true}}}},
 "scheduler": {{"type": "WarmupLR", "params": {{"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}}},
 "zero_optimization": {{"stage": {stage}}}}}
"""
LAUNCHER = "deepspeed --num_gpus 2 --master_port {port}"
LIGHTNING = f"{E2E}/lightning_loops.py {{out}} {{stage}}/32-true"
CLM = (
    f"{SCRIPTS}/run_clm.py --model_name_or_path {{data}}/model --train_file {{data}}/text/train.jsonl "
    f"--deepspeed {{data}}/zero{{stage}}.json {HF}"
)


def nlp(name: str) -> str:
    launch = "accelerate launch --config_file {file} --main_process_port {port}"
    return f"{launch} {SCRIPTS}/{name}.py --model {{data}}/model --out {{out}}"


def accelerate_config(steps: int) -> str:
    return ACCELERATE.replace("{steps}", str(steps))


TOOLS: Mapping[str, Tool] = {
    "trl": Tool(
        "TRL",
        "trl",
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft", "torch==2.13.0"),
        (
            *map(of_script, ("sft", "lora", "dpo", "kto", "reward", "grpo", "rloo", "gkd")),
            of_command("sft", "chats", "--max_length 64"),
            of_command("dpo", "pairs", "--max_length 64"),
            of_command("kto", "marked", "--max_length 64"),
            of_command("reward", "whole", "--max_length 64"),
        ),
        without="adapters that are merged for vLLM at stage 3: writing inside `GatheredParameters` without "
        "`modifier_rank` is an error",
    ),
    "transformers": Tool(
        "transformers `Trainer`",
        "transformers",
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft", "torch==2.13.0"),
        (Example("`run_clm`-like", f"{TORCHRUN} {CLM}", beside=f"{ON_DEEPSPEED} {CLM}"),),
    ),
    "accelerate": Tool(
        "accelerate",
        "accelerate",
        ("trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "peft", "torch==2.13.0"),
        (
            Example("`nlp_example`-like", nlp("nlp_example"), accelerate_config(1)),
            Example("`complete_nlp_example`-like", nlp("complete_nlp_example"), accelerate_config(2)),
        ),
        without="several machines through its `deepspeed` launcher; sequence parallelism",
    ),
    "deepspeed": Tool(
        "DeepSpeedExamples-like loop",
        "deepspeed",
        ("torch==2.13.0",),
        (
            Example("`torchrun`", f"{TORCHRUN} {LOOP}", LOOP_CONFIG, f"{ON_DEEPSPEED} {LOOP}"),
            Example("`deepspeed`", f"{LAUNCHER} {LOOP}", LOOP_CONFIG, f"{ON_DEEPSPEED} {LOOP}"),
        ),
        without="several machines through its launcher: `zerodrift run -- torchrun --nnodes ...` on each; "
        "autotuning; elastic training",
    ),
    "lightning": Tool(
        "Lightning `Trainer` and Fabric",
        "lightning",
        ("lightning==2.6.6", "torch==2.13.0"),
        (
            Example(
                "script: `Trainer` and Fabric",
                f"{TORCHRUN} {LIGHTNING}",
                beside=f"{ON_DEEPSPEED} {LIGHTNING}",
            ),
        ),
        without="offload to NVMe; Lightning's `convert_zero_checkpoint_to_fp32_state_dict`: use "
        "`zero_to_fp32.py` in the checkpoint",
    ),
    "llamafactory": Tool(
        "LLaMA-Factory",
        "llamafactory",
        ("llamafactory==0.9.5", "torch==2.13.0"),
        tuple(
            Example(name, "llamafactory-cli train {file}", LLAMAFACTORY + more)
            for name, more in (
                ("SFT", "stage: sft\ndataset: alpaca\n" + FULL),
                ("pretraining", "stage: pt\ndataset: text\n" + FULL),
                ("DPO", "stage: dpo\ndataset: pairs\npref_beta: 0.1\n" + FULL),
                ("LoRA", "stage: sft\ndataset: alpaca\n" + LORA_OF_LLAMAFACTORY),
            )
        ),
        {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": "2"},
        ("torchaudio",),
    ),
    "axolotl": Tool(
        "Axolotl",
        "axolotl",
        ("axolotl==0.19.0", "torch==2.13.0"),
        tuple(
            Example(name, AXOLOTL_COMMAND, AXOLOTL + more)
            for name, more in (("SFT", ""), ("LoRA", LORA_OF_AXOLOTL))
        ),
    ),
    "ms-swift": Tool(
        "ms-swift",
        "ms-swift",
        ("ms-swift==4.6.0", "torch==2.13.0"),
        (
            Example("`swift sft`", SWIFT.replace("{kind}", "sft") + " --tuner_type full"),
            Example("LoRA", SWIFT.replace("{kind}", "sft") + " --tuner_type lora --lora_rank 4"),
            Example("`swift pt`", SWIFT.replace("{kind}", "pt") + " --tuner_type full"),
        ),
        {"NPROC_PER_NODE": "2", "USE_HF": "1"},
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    """What came of an example at one stage."""

    tool: str
    version: str
    example: str
    stage: int
    ran: bool
    losses: int
    """How many numbers were compared."""
    apart: float | None
    """The largest difference from DeepSpeed, as a part of the number; None where DeepSpeed did not run."""
    date: str

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tool, self.example, self.stage


# --- the page -------------------------------------------------------------------------------------------


def results() -> list[Result]:
    return [Result(**row) for row in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def table(found: list[Result]) -> str:
    """What was tried, a row for each tool."""
    lines = ["| tool | version | works at stages 2 and 3 | fp32 beside DeepSpeed | what does not | date |"]
    lines.append("| --- " * 6 + "|")
    for name, tool in TOOLS.items():
        rows = [row for row in found if row.tool == name]
        if not rows:
            lines.append(f"| {tool.shown} | - | - | - | not tried yet | - |")
            continue
        works = [
            e.name for e in tool.examples if [r.ran for r in rows if r.example == e.name] == [True, True]
        ]
        fails = [f"{r.example} at stage {r.stage}" for r in rows if not r.ran]
        fails += [
            f"{r.example} is {r.apart:.0e} from DeepSpeed at stage {r.stage}"
            for r in rows
            if (r.apart or 0) > NEAR
        ]
        known = {row.example for row in rows}
        left = [example.name for example in tool.examples if example.name not in known]
        fails += [f"not tried yet: {', '.join(left)}"] if left else []
        apart = [row.apart for row in rows if row.apart is not None and row.apart <= NEAR]
        most = f"at most {max(apart):.0e}" if any(apart) else "not a digit"
        beside = f"{len(apart)} runs, {most} apart" if apart else "-"
        without = "; ".join([*fails, *filter(None, [tool.without])]) or "-"
        date = max(row.date for row in rows)
        lines.append(
            f"| {tool.shown} | {rows[0].version} | {', '.join(works)} | {beside} | {without} | {date} |"
        )
    return "\n".join(lines) + "\n"


def write_page() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results())}\n{END}{after}")


def keep(result: Result) -> None:
    rows = {row.key: row for row in results()} | {result.key: result}
    order = [(name, e.name, stage) for name, tool in TOOLS.items() for e in tool.examples for stage in (2, 3)]
    kept = [asdict(rows[key]) for key in order if key in rows]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(row) for row in kept) + "\n]\n")
    write_page()


# --- one tool -------------------------------------------------------------------------------------------


def numbers(told: Any) -> Iterator[float]:
    """All numbers in lists, in the order of their names."""
    if isinstance(told, dict):
        for key in sorted(told):
            yield from numbers(told[key])
    elif isinstance(told, list):
        yield from (float(value) for value in told if isinstance(value, (int, float)))


def losses(folder: Path) -> list[float]:
    """What a run wrote into its folder."""
    told = folder / "told.json"
    if told.exists():
        return [value for case in json.loads(told.read_text()).values() for value in numbers({"": case})]
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    history = json.loads(states[-1].read_text())["log_history"] if states else []
    return [entry["loss"] for entry in history if "loss" in entry]


def run(
    python: Path, tool: Tool, example: Example, stage: int, data: Path, out: Path, *, beside: bool
) -> list[float]:
    """The losses of one command; none where it failed."""
    out.mkdir()
    port = str(29700 + os.getpid() % 200)
    names = {"data": str(data), "out": str(out), "stage": str(stage), "port": port}
    file = out / "example.yaml"
    if example.file:
        file.write_text(example.file.format(**names))
    words = (
        (example.beside if beside and example.beside else example.command).format(**names, file=file).split()
    )
    command = words if beside else [str(python), "-m", "zerodrift", "run", "--", *words]
    environment = {
        **os.environ,
        **tool.environment,
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "MASTER_PORT": port,
        "PYTHONPATH": str(SCRIPTS / "on_cpu"),
        **dict.fromkeys(("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "AXOLOTL_DO_NOT_TRACK"), "1"),
    }
    with (out.with_suffix(".log")).open("w") as log:
        try:
            done = subprocess.run(
                command, env=environment, cwd=data, stdout=log, stderr=log, timeout=400, check=False
            )
        except subprocess.TimeoutExpired:
            return []
    found = losses(out)
    return found if done.returncode == 0 and found else []


def try_tool(python: Path, name: str, only: Sequence[str] = ()) -> None:
    """Every example of a tool, or some by their names."""
    tool = TOOLS[name]
    asked = f"import importlib.metadata as m; print(m.version({tool.package!r}))"
    said = subprocess.run([str(python), "-c", asked], check=True, capture_output=True, text=True)
    folder = Path(tempfile.mkdtemp(prefix=f"doors-{name}-"))
    data = folder / "data"
    data.mkdir()
    subprocess.run([str(python), str(SCRIPTS / "tiny.py"), str(data)], check=True)
    for number, example in enumerate(tool.examples):
        if only and example.name.replace("`", "") not in only:
            continue
        there = run(python, tool, example, 2, data, folder / f"{number}-deepspeed", beside=True)
        for stage in (2, 3):
            here = run(python, tool, example, stage, data, folder / f"{number}-{stage}", beside=False)
            apart = None
            if here and len(here) == len(there):
                apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(here, there, strict=True))
            date = datetime.date.today().isoformat()
            row = Result(name, said.stdout.strip(), example.name, stage, bool(here), len(here), apart, date)
            keep(row)
            print(f"{row}  ({folder}/{number}-{stage}.log)", flush=True)


def environment(name: str, folder: Path) -> Path:
    """The interpreter of a tool, whose environment is made where it is not there."""
    tool = TOOLS[name]
    home = folder / "-".join(tool.packages[:1]).replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet"]
        quiet = {**os.environ, "DS_BUILD_OPS": "0"}
        subprocess.run([*install, "setuptools", *tool.packages, str(ROOT)], check=True, env=quiet)
        subprocess.run([*install, "--no-build-isolation", DEEPSPEED], check=True, env=quiet)
        for module in tool.empty:
            (next((home / "lib").glob("python*")) / "site-packages" / f"{module}.py").touch()
        (home / "ready").touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    every = verbs.add_parser("all")
    every.add_argument("folder", type=Path)
    every.add_argument("tools", nargs="*", choices=[[], *TOOLS], default=[])
    one = verbs.add_parser("one")
    one.add_argument("python", type=Path)
    one.add_argument("tool", choices=TOOLS)
    one.add_argument("names", nargs="*")
    verbs.add_parser("page")
    asked = parser.parse_args()
    if asked.verb == "page":
        write_page()
    elif asked.verb == "one":
        try_tool(Path(os.path.abspath(asked.python)), asked.tool, asked.names)
    else:
        for name in asked.tools or TOOLS:
            print(f"== {name}", flush=True)
            try:
                try_tool(environment(name, asked.folder.resolve()), name)
            except (OSError, subprocess.CalledProcessError) as error:
                print(f"not tried: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
