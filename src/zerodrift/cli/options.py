"""Every option and argument of the command line, with its help.

Invariant: nothing here runs, and every one says what it does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# --- of every verb ------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

# --- plan, explain, support ---------------------------------------------------------------------------

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="Config file, YAML or JSON; a DeepSpeed config will do.")
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="X",
        help="A folder or file with a transformers config or safetensors, or package.module:function.",
    ),
]
WorldSize = Annotated[int, typer.Option("--world-size", metavar="N", min=1, help="Ranks to plan for.")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override a config key: zero_optimization.stage=2. Repeatable."
    ),
]
Auto = Annotated[
    list[str] | None,
    typer.Option(
        "--auto",
        metavar="KEY=NUMBER[,NUMBER]",
        help='What a numeric "auto" of the config stands for. Repeatable.',
    ),
]
MicroBatches = Annotated[
    int | None, typer.Option(metavar="M", min=1, help="Micro-batches per step to count the cost for.")
]
Rows = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Only parameters that match the glob, one by one.")
]
Html = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the plan as one self-contained HTML page.")
]
Parameter = Annotated[str, typer.Argument(metavar="PARAM", help="Full name of a parameter.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print a Markdown page.")]

# --- inspect and convert ------------------------------------------------------------------------------

Checkpoint = Annotated[
    Path, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of checkpoints.")
]
Verify = Annotated[
    bool, typer.Option("--verify", help="Compare every file with its checksum, not only its size.")
]
Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A checkpoint, DeepSpeed's too, or safetensors files.")
]
Target = Annotated[Path, typer.Argument(metavar="TARGET", help="The folder to write.")]
To = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="KIND",
        help="safetensors or checkpoint; left out, ours becomes safetensors, the rest a checkpoint.",
    ),
]
WeightsModel = Annotated[
    str | None,
    typer.Option("--model", metavar="X", help="Folder or file with the weights' transformers config."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="D", help="fp32, bf16 or fp16, for safetensors.")
]
MaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", help="Of one safetensors file.")
]
Tag = Annotated[str, typer.Option("--tag", metavar="TAG", help="Which one; the latest if left out.")]
Moments = Annotated[
    str, typer.Option("--optimizer", metavar="KIND", help="Of DeepSpeed's moments, if not AdamW.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code that pickles of DeepSpeed name. For your own files.")
]

# --- train and sample ---------------------------------------------------------------------------------

Job = Annotated[str, typer.Argument(metavar="JOB", help="Job file, YAML or JSON; see docs/job.md.")]
SetInJob = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key: run.steps=100. Repeatable."),
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, help="Processes on this machine; one per GPU, else one."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="What the text begins with.")]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", min=1, help="At most so many.")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, help="0 takes the likeliest token.")
]
Top = Annotated[
    int, typer.Option("--top", metavar="K", min=0, help="Of the K likeliest tokens; 0 is of all.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="S", min=0, max=2**63 - 1, help="Of the choice.")]
Chat = Annotated[bool, typer.Option("--chat", help="The prompt is what a user says in a conversation.")]
