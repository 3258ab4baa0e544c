"""What `--help` says of every verb, below its usage line.

Invariant: every example is a command that runs as it stands, but for the paths in it.
"""

from __future__ import annotations

ROOT = """\
Sharded mixed-precision training in which every dtype is decided in one readable table.

\b
Start here:
  zerodrift plan config.yaml --model path/to/model --world-size 8
"""

PLAN = """\
Show what will happen: every dtype of every parameter, why, and what it costs.

Nothing is started and no weights are read, so a laptop can plan for thousands of ranks.

\b
Examples:
  zerodrift plan ds_config.json --model path/to/model --world-size 64
  zerodrift plan config.yaml --model path/to/model --rows '*.router.*'
  zerodrift plan config.yaml --model path/to/model --set precision.mode=bf16 --html plan.html

--rows narrows what is printed, as text or JSON; the HTML page always holds the whole plan.
"""

EXPLAIN = """\
Show one parameter: each of its dtypes, what set it, and which rank owns what.

\b
Example:
  zerodrift explain config.yaml --model path/to/model model.layers.3.mlp.router.weight
"""

SUPPORT = """\
Show which modes, accumulate dtypes, states, stages, pipelines and backends go together.

\b
Examples:
  zerodrift support
  zerodrift support --markdown > docs/support.md
"""

INSPECT = """\
Show what is in a checkpoint: step, plan, tensors, sizes, and whether it is complete.

Exit code 2 if one is not.

\b
Examples:
  zerodrift inspect runs/a
  zerodrift inspect runs/a/step-00000200 --verify
"""

CONVERT = """\
Convert weights, and masters, moments and counters where both sides have them.

What SOURCE is, is found out and printed. One process does it, a few megabytes at a time. With --model,
safetensors get the names, layout and config that transformers loads; without it, the module's own names.

\b
Examples:
  zerodrift convert runs/a exported --model path/to/model --dtype bf16
  zerodrift convert ds_run converted              (DeepSpeed ZeRO 0-3, to go on training)
  zerodrift convert ds_run exported --to safetensors --model path/to/model
  zerodrift convert path/to/model start --to checkpoint
"""

TRAIN = """\
Train: data, model, plan, steps, checkpoints, a report, and the model at the end.

Goes on from the newest checkpoint of the run's folder, if there is one. Under torchrun or srun it joins
the ranks that were started. Ctrl-C finishes the step and saves; a second one ends it at once.

\b
Examples:
  zerodrift train examples/jobs/pretrain.yaml
  zerodrift train job.yaml --set run.steps=100 --set config.zero_optimization.stage=2 --nproc 2
  torchrun --nproc-per-node=8 -m zerodrift train job.yaml
"""

SAMPLE = """\
Let a trained model go on from a prompt, to see that it learned.

Reads the run's export, or its newest checkpoint where it has not ended.

\b
Examples:
  zerodrift sample runs/demo --prompt 'def '
  zerodrift sample runs/chat --chat --prompt 'Who are you?' --temperature 0
"""
