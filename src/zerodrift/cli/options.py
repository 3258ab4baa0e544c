"""Options and arguments of the command line, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer


def _option(usage: str, help: str, **limits: Any) -> Any:
    """Return an option from its flag and, after a blank, the name of its value."""
    flag, _, metavar = usage.partition(" ")
    return typer.Option(flag, metavar=metavar or None, help=help, **limits)


def _argument(metavar: str, help: str, **more: Any) -> Any:
    return typer.Argument(metavar=metavar, help=help, **more)


Text = str | None
Texts = list[str] | None
Count = int | None
File = Path | None

# --- of every command ------------------------------------------------------------------------------------
Json = Annotated[bool, _option("--json", "Print JSON.")]
Debug = Annotated[bool, _option("--debug", "Show the traceback of an error.")]

# --- plan, explain, support ---------------------------------------------------------------------------
Config = Annotated[str, _argument("CONFIG", "Config in YAML or JSON, zerodrift's or DeepSpeed's; or a job.")]
_MODEL = _option("--model X", "Folder with a config or safetensors, or module:function.")
Model = Annotated[Text, _MODEL]
ModelOfTrainer = Annotated[str, _MODEL]
WorldSize = Annotated[Count, _option("--world-size N", "Ranks to plan for. Default: 1, or a job's.", min=1)]
Set = Annotated[Texts, _option("--set KEY=VALUE", "Override a key: zero_optimization.stage=2. Repeatable.")]
Auto = Annotated[Texts, _option("--auto KEY=N[,N]", 'Number for a key whose value is "auto". Repeatable.')]
MicroBatches = Annotated[Count, _option("--micro-batches M", "Micro-batches per step, for the cost.", min=1)]
Rows = Annotated[Text, _option("--rows PATTERN", "List each parameter whose name matches.")]
Html = Annotated[File, _option("--html FILE", "Also write the plan as a single HTML page.")]
Trace = Annotated[bool, _option("--trace", "Show the dtypes of every operation of a step.")]
Inputs = Annotated[Text, _option("--inputs FUNCTION", "A module:function that returns the model's inputs.")]
Device = Annotated[
    Literal["cpu", "cuda"] | None,
    _option("--device DEVICE", "With --trace: cpu or cuda. Default: the job's."),
]
Simulate = Annotated[Text, _option("--simulate CLUSTER", "Simulate a step on h100, h200, a100 or your file.")]
Sweep = Annotated[bool, _option("--sweep", "With --simulate: compare stages, wires, orders and replicas.")]
TokensOfSample = Annotated[Count, _option("--tokens N", "Tokens of a simulated sample.", min=2, max=1 << 24)]
Recompute = Annotated[bool, _option("--recompute", "With --simulate: recompute activations by block.")]
Parameter = Annotated[str, _argument("PARAM", "The full name of a parameter.")]
Markdown = Annotated[bool, _option("--markdown", "Print the table as a Markdown page.")]

# --- check, run and diff -------------------------------------------------------------------------------
Command = Annotated[list[str], _argument("-- COMMAND...", "The command that trains, as it would be run.")]
Steps = Annotated[int, _option("--steps N", "Optimizer steps to watch.", min=1)]
Expect = Annotated[
    File,
    _option(
        "--expect FILE",
        "Saved table, plan or config (also DeepSpeed's) to compare with; exit code 3 if the run differs.",
    ),
]
SaveTable = Annotated[File, _option("--save FILE", "Write the observed table, for --expect and diff.")]
HtmlTable = Annotated[File, _option("--html FILE", "Also write the result as a single HTML page.")]
KeepGoing = Annotated[bool, _option("--keep-going", "Let the command run to its end, and check its files.")]
StandInFor = Annotated[str, _option("--as NAME", "Library that zerodrift replaces; only deepspeed.")]
PinnedPatterns = Annotated[
    Texts,
    _option(
        "--pin PATTERN",
        "Keep parameters in fp32 whose names match this glob: '*.router.*'. Repeatable.",
    ),
]
AddedKeys = Annotated[
    Texts, _option("--set KEY=VALUE", "Add a key to every config: precision.reduce=fp32. Repeatable.")
]
Quiet = Annotated[bool, _option("--quiet", "Print no plan.")]
AddedFile = Annotated[File, _option("--config FILE", "Add the keys of a file to every config.")]
Timeout = Annotated[
    float | None, _option("--timeout SECONDS", "Time limit of the command. Default: none.", min=0)
]
TableA = Annotated[Path, _argument("A", "A table that `check --save` wrote.")]
TableB = Annotated[Path, _argument("B", "Another table.")]

# --- audit --------------------------------------------------------------------------------------------
JobOrConfig = Annotated[str, _argument("JOB_OR_CONFIG", "A job file, or a config with --model.")]
ModelOfConfig = Annotated[
    Text, _option("--model X", "With a config: a transformers folder or config, or package.module:function.")
]
WeightsOfModel = Annotated[
    File, _option("--weights PATH", "Safetensors. Default: those in --model's folder.")
]
TokensOfAudit = Annotated[
    File,
    _option("--data FILE", "Token ids: .npy, .pt, .safetensors, .json or .jsonl. Default: drawn at random."),
]
Batches = Annotated[int, _option("--batches N", "Micro-batches on each rank.", min=1)]
Budget = Annotated[str, _option("--budget SHARE", "Bytes that pins may add: 1% or 0.01.")]
BudgetOf = Annotated[str, _option("--of BYTES", "Bytes that count for --budget: rest, peak or wire.")]
Confirm = Annotated[int, _option("--confirm K", "Costliest cells to replay.", min=0)]
Narrow = Annotated[
    Text,
    _option(
        "--narrow GOAL",
        "Use narrow formats for bytes or speed, up to 1.5x drift; or bytes:2x.",
    ),
]
HtmlAudit = Annotated[File, _option("--html FILE", "Also write the audit as a single HTML page.")]

# --- drift --------------------------------------------------------------------------------------------
TrainerConfig = Annotated[
    str,
    _argument(
        "CONFIG",
        "The trainer's config, plan, or table from `check --save`. A config may be DeepSpeed's.",
    ),
]
TokenFile = Annotated[Path, _option("--tokens FILE", "Token ids: .npy, .pt, .safetensors, .json, .jsonl.")]
TrainedWeights = Annotated[
    File, _option("--weights PATH", "Run, checkpoint or safetensors. Default: --model's.")
]
SentFolder = Annotated[File, _option("--sent FOLDER", "Safetensors that the trainer wrote for the sampler.")]
LoadedFolder = Annotated[File, _option("--loaded FOLDER", "Safetensors that the sampler loaded.")]
SamplerTable = Annotated[File, _option("--sampler FILE", "The sampler's dtypes; keys in docs/drift.md.")]
RecordedFile = Annotated[File, _option("--recorded FILE", "The sampler's log-probabilities, as JSON.")]
Bar = Annotated[float, _option("--bar D", "Largest mean |difference| that passes.", min=0.0)]

# --- inspect and convert ------------------------------------------------------------------------------
Checkpoint = Annotated[Path, _argument("CHECKPOINT", "A checkpoint, or a folder of checkpoints.")]
Verify = Annotated[bool, _option("--verify", "Check every file against its checksum, not only its size.")]
Source = Annotated[Path, _argument("SOURCE", "A checkpoint of zerodrift or DeepSpeed, or safetensors files.")]
Target = Annotated[Path, _argument("TARGET", "The folder to write.")]
To = Annotated[
    Literal["safetensors", "checkpoint"] | None,
    _option(
        "--to KIND",
        "safetensors or checkpoint. Default: safetensors for zerodrift checkpoints, else checkpoint.",
    ),
]
WeightsModel = Annotated[Text, _option("--model X", "Folder or file with the weights' transformers config.")]
Dtype = Annotated[Text, _option("--dtype D", "Dtype in files: fp32, bf16, fp16, or narrow: fp8-row.")]
MaxShardSize = Annotated[str, _option("--max-shard-size SIZE", "Maximum size of one file.")]
Tag = Annotated[str, _option("--tag TAG", "The checkpoint to read. Default: the latest.")]
Moments = Annotated[str, _option("--optimizer KIND", "DeepSpeed's optimizer, if it is not AdamW.")]
Overwrite = Annotated[bool, _option("--overwrite", "Replace TARGET if it exists.")]
Trust = Annotated[bool, _option("--trust", "Unpickle DeepSpeed files, which may run code.")]
Merge = Annotated[bool, _option("--merge", "Merge adapters into their base, or into --model.")]

# --- train and sample ---------------------------------------------------------------------------------
Job = Annotated[str, _argument("JOB", "Job file (docs/job.md lists its keys), or the folder of a run.")]
SetInJob = Annotated[Texts, _option("--set KEY=VALUE", "Override a job's key: run.steps=100. Repeatable.")]
Nproc = Annotated[
    Count, _option("--nproc N", "Processes to start on this machine. Default: one per GPU, or one.", min=1)
]
WholePlan = Annotated[bool, _option("--plan", "Print every dtype before the first step, and why.")]
DryRun = Annotated[bool, _option("--dry-run", "Check the job and its data, show its plan, start nothing.")]
FirstStep = Annotated[
    Count,
    _option(
        "--from STEP",
        "Start from the newest checkpoint up to this step; 0 is the start. Default: the oldest one.",
        min=0,
    ),
]
LastStep = Annotated[Count, _option("--to STEP", "The last step. Default: the last with a digest.", min=1)]
ReplayNproc = Annotated[
    Count, _option("--nproc N", "Processes to start on this machine. Default: as many as the run had.", min=1)
]
Run = Annotated[Path, _argument("RUN", "The folder of a run.")]
Prompt = Annotated[str, _option("--prompt TEXT", "The text to continue.")]
Tokens = Annotated[int, _option("--tokens N", "Largest number of tokens to generate.", min=1)]
Temperature = Annotated[
    float,
    _option("--temperature T", "Sampling temperature; 0 always takes the likeliest token.", min=0, max=100),
]
Top = Annotated[int, _option("--top K", "Sample from the K likeliest tokens; 0 means from all.", min=0)]
Seed = Annotated[int, _option("--seed S", "Seed for sampling.", min=0, max=2**63 - 1)]
Chat = Annotated[bool, _option("--chat", "Treat the prompt as the user's turn in a conversation.")]

# --- examples -----------------------------------------------------------------------------------------
CopyExamples = Annotated[bool, _option("--copy", "Copy the examples into FOLDER.")]
ExamplesFolder = Annotated[Path, _argument("[FOLDER]", "New folder. Default: examples.", show_default=False)]
HelpTopic = Annotated[
    str,
    _argument("[NAME]", "A kind of error, a finding or a command. Default: list them.", show_default=False),
]
