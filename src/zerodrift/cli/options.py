"""Options and arguments of the command line, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- of every verb ------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# --- plan, explain, support ---------------------------------------------------------------------------

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Config file in YAML or JSON, ours or DeepSpeed's; or a job.")
]
_MODEL = typer.Option(
    "--model",
    metavar="X",
    help="A folder or file with a transformers config or safetensors, or package.module:function.",
)
Model = Annotated[str | None, _MODEL]
ModelOfTrainer = Annotated[str, _MODEL]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--world-size", metavar="N", min=1, help="Ranks to plan for. Default: 1, or a job's `nproc`."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a config key, as in zero_optimization.stage=2. Repeatable.",
    ),
]
Auto = Annotated[
    list[str] | None,
    typer.Option(
        "--auto",
        metavar="KEY=NUMBER[,NUMBER]",
        help='The number for a key that the config sets to "auto". Repeatable.',
    ),
]
MicroBatches = Annotated[
    int | None, typer.Option(metavar="M", min=1, help="Micro-batches per step to assume for the cost.")
]
Rows = Annotated[
    str | None,
    typer.Option(metavar="PATTERN", help="List only the parameters that match this glob, one by one."),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Also write the plan as a single self-contained HTML page."),
]
Trace = Annotated[
    bool,
    typer.Option("--trace", help="Show what every operation of a step would compute in, module by module."),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FUNCTION",
        help="For --trace and --simulate: package.module:function that returns the model's arguments.",
    ),
]
Simulate = Annotated[
    str | None,
    typer.Option(
        "--simulate",
        metavar="CLUSTER",
        help="Show what a step would take on machines that a file describes; h100, h200 and a100 are there.",
    ),
]
Sweep = Annotated[
    bool,
    typer.Option("--sweep", help="With --simulate: rank stages, wires, orders, replicas and recomputation."),
]
TokensOfSample = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        metavar="N",
        min=2,
        max=1 << 24,
        help="With --simulate: tokens of a sample. Default: a job's `block`.",
    ),
]
Recompute = Annotated[
    bool,
    typer.Option(
        "--recompute", help="With --simulate: blocks compute activations again. A job says it itself."
    ),
]
Parameter = Annotated[str, typer.Argument(metavar="PARAM", help="The full name of a parameter.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as a Markdown page.")]

# --- check, run and diff -------------------------------------------------------------------------------

Command = Annotated[
    list[str], typer.Argument(metavar="-- COMMAND...", help="The command that trains, as it would be run.")
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to watch.")]
Expect = Annotated[
    Path | None,
    typer.Option(
        "--expect",
        metavar="FILE",
        help="A saved table, a plan, or a config, also DeepSpeed's: exit code 3 where the run differs.",
    ),
]
SaveTable = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Write what was seen, for --expect and diff.")
]
HtmlTable = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write what was seen as a single HTML page."),
]
KeepGoing = Annotated[
    bool, typer.Option("--keep-going", help="Let the command run to its end, and see the files it writes.")
]
StandInFor = Annotated[
    str,
    typer.Option("--as", metavar="NAME", help="What zerodrift stands in for: deepspeed, and no other yet."),
]
PinnedPatterns = Annotated[
    list[str] | None,
    typer.Option(
        "--pin",
        metavar="PATTERN",
        help="Keep parameters in fp32 whose names match this glob, as in '*.router.*'. Repeatable.",
    ),
]
AddedKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Add a key to every config, as in precision.reduce=fp32. Repeatable.",
    ),
]
AddedFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Add the keys of a file to every config.")
]
Timeout = Annotated[
    float | None,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0,
        help="End the command where its steps take longer; without a limit by default.",
    ),
]
TableA = Annotated[Path, typer.Argument(metavar="A", help="A table that `check --save` wrote.")]
TableB = Annotated[Path, typer.Argument(metavar="B", help="Another one.")]

# --- audit --------------------------------------------------------------------------------------------

JobOrConfig = Annotated[
    str, typer.Argument(metavar="JOB_OR_CONFIG", help="A job file, or a config with --model.")
]
ModelOfConfig = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="X",
        help="With a config: a transformers folder or config, or package.module:function.",
    ),
]
WeightsOfModel = Annotated[
    Path | None,
    typer.Option(
        "--weights", metavar="PATH", help="Safetensors of the model. Default: those in --model's folder."
    ),
]
TokensOfAudit = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="FILE",
        help="Token ids: .npy, .pt, .safetensors, .json or .jsonl. Default: drawn at random.",
    ),
]
Batches = Annotated[int, typer.Option("--batches", metavar="N", min=1, help="Micro-batches on each rank.")]
Budget = Annotated[
    str, typer.Option("--budget", metavar="SHARE", help="More bytes that pins may cost: 1% or 0.01.")
]
BudgetOf = Annotated[
    str, typer.Option("--of", metavar="BYTES", help="Which bytes: at rest, at peak or on the wire.")
]
Confirm = Annotated[
    int, typer.Option("--confirm", metavar="K", min=0, help="Cells of the shortlist that are replayed.")
]
HtmlAudit = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Also write the audit as a single self-contained HTML page."),
]

# --- drift --------------------------------------------------------------------------------------------

TrainerConfig = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="The trainer's config, ours or DeepSpeed's; or a plan, or a table that `check --save` wrote.",
    ),
]
TokenFile = Annotated[
    Path,
    typer.Option("--tokens", metavar="FILE", help="Token ids: .npy, .pt, .safetensors, .json or .jsonl."),
]
TrainedWeights = Annotated[
    Path | None,
    typer.Option(
        "--weights",
        metavar="PATH",
        help="A checkpoint, ours or DeepSpeed's, or safetensors. Default: those of --model.",
    ),
]
SentFolder = Annotated[
    Path | None,
    typer.Option("--sent", metavar="FOLDER", help="The safetensors that the trainer wrote for the sampler."),
]
LoadedFolder = Annotated[
    Path | None,
    typer.Option("--loaded", metavar="FOLDER", help="The tensors that the sampler holds, as safetensors."),
]
SamplerTable = Annotated[
    Path | None,
    typer.Option(
        "--sampler",
        metavar="FILE",
        help="The sampler's dtypes in YAML or JSON; docs/drift.md lists its keys.",
    ),
]
RecordedFile = Annotated[
    Path | None,
    typer.Option(
        "--recorded",
        metavar="FILE",
        help="Log-probabilities of the tokens that the sampler gave: .json, .jsonl.",
    ),
]
Bar = Annotated[
    float,
    typer.Option(
        "--bar", metavar="D", min=0.0, help="The mean |difference| of log-probabilities that is let pass."
    ),
]

# --- inspect and convert ------------------------------------------------------------------------------

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of checkpoints.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Check every file against its checksum, not only its size.")
]
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A checkpoint, ours or DeepSpeed's, or safetensors files.")
]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="KIND",
        help="safetensors or checkpoint. Default: safetensors for our checkpoints, else a checkpoint.",
    ),
]
WeightsModel = Annotated[
    str | None,
    typer.Option("--model", metavar="X", help="Folder or file with the transformers config of the weights."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="D", help="Dtype of the safetensors: fp32, bf16 or fp16.")
]
MaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Maximum size of one safetensors file.")
]
Tag = Annotated[
    str, typer.Option("--tag", metavar="TAG", help="The checkpoint to read. Default: the latest.")
]
Moments = Annotated[
    str,
    typer.Option(
        "--optimizer",
        metavar="KIND",
        help="The optimizer that DeepSpeed's moments belong to, if it is not AdamW.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Unpickle DeepSpeed files that run code. Only for files of your own.")
]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        help="Merge the adapters at SOURCE into their base, which --model names where it has moved.",
    ),
]

# --- train and sample ---------------------------------------------------------------------------------

Job = Annotated[
    str, typer.Argument(metavar="JOB", help="Job file in YAML or JSON; docs/job.md lists its keys.")
]
SetInJob = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a key of the job, as in run.steps=100. Repeatable."
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        min=1,
        help="Processes to start on this machine. Default: one per GPU, or one.",
    ),
]
WholePlan = Annotated[
    bool, typer.Option("--plan", help="Print every parameter's dtypes before the first step, and why.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check the job, read its data, show its plan, and start nothing.")
]
FirstStep = Annotated[
    int | None,
    typer.Option(
        "--from",
        metavar="STEP",
        min=0,
        help="Begin with the newest checkpoint up to this step; 0 begins anew. Default: the oldest one.",
    ),
]
LastStep = Annotated[
    int | None,
    typer.Option("--to", metavar="STEP", min=1, help="The last step. Default: the last one with a digest."),
]
ReplayNproc = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        min=1,
        help="Processes to start on this machine. Default: as many as the run had.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="The text to continue.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="The most tokens to generate.")]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="T",
        min=0.0,
        help="Sampling temperature; 0 always takes the likeliest token.",
    ),
]
Top = Annotated[
    int,
    typer.Option("--top", metavar="K", min=0, help="Sample from the K likeliest tokens; 0 means from all."),
]
Seed = Annotated[int, typer.Option("--seed", metavar="S", min=0, max=2**63 - 1, help="Seed for sampling.")]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as the user's turn in a conversation.")]

# --- examples -----------------------------------------------------------------------------------------

CopyExamples = Annotated[bool, typer.Option("--copy", help="Copy the examples into FOLDER.")]
ExamplesFolder = Annotated[
    Path, typer.Argument(metavar="[FOLDER]", help="Where to copy to. Default: examples.", show_default=False)
]
