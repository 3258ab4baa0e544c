"""Help texts of every verb, below its usage line.

Invariant: every example runs as it stands, except for its paths.
"""

from __future__ import annotations

ROOT = """\
Sharded mixed-precision training in which every dtype is decided in one readable table.

\b
Start here:
  zerodrift doctor
  zerodrift examples --copy
  zerodrift plan config.yaml --model path/to/model --world-size 8
  zerodrift train job.yaml --dry-run
"""

PLAN = """\
Show every dtype of every parameter, why it is so, and what a step costs.

Nothing is started and no weights are read, so a laptop can plan for thousands of ranks.

\b
Examples:
  zerodrift plan ds_config.json --model path/to/model --world-size 64
  zerodrift plan config.yaml --model path/to/model --rows '*.router.*'
  zerodrift plan config.yaml --model path/to/model --html plan.html
  zerodrift plan config.yaml --model path/to/model --trace
  zerodrift plan config.yaml --model path/to/model --set precision.mode=bf16
  zerodrift plan config.yaml --model path/to/model --world-size 64 \\
    --simulate h100 --tokens 4096
  zerodrift plan job.yaml --world-size 8

--rows limits what is printed, as text or as JSON. The HTML page always shows the whole plan.

--trace runs one forward and backward without weights, in seconds, and prints the dtypes of every operation
in place of the plan. Values that are widened and rounded again, pins that the model's code casts and
operations that torch would refuse come first. They do not change the exit code. A model of transformers is
called with what its class takes; for any other, --inputs names a function that returns a dict of arguments,
a tuple or a tensor, unless its forward takes input_ids.

--simulate prints what a step would take on the machines of a YAML file, in the order of the engine: time,
what nothing hides, memory. --sweep ranks stages, wires, orders, replicas and recomputation.
"""

EXPLAIN = """\
Show one parameter: its dtypes, what set each of them, and which rank owns which part.

\b
Example:
  zerodrift explain config.yaml --model path/to/model \\
    model.layers.3.mlp.router.weight
"""

SUPPORT = """\
Show which modes, accumulate dtypes, states, stages, pipelines and backends work together.

\b
Examples:
  zerodrift support
  zerodrift support --markdown > docs/support.md
"""

CHECK = """\
Run a training command, and show which dtypes every parameter has in it.

The command runs as it stands, on whatever library it uses, with an observer in each of its Python processes.
It ends after the steps that are watched, unless --keep-going is given. What --expect names is held against
what was seen. Exit code 2: nothing could be seen; 3: not as expected.

\b
Examples:
  zerodrift check -- torchrun --nproc-per-node 2 train.py
  zerodrift check --expect ds.json -- deepspeed train.py --deepspeed ds.json
  zerodrift check --save precision.json -- accelerate launch train.py
  zerodrift check --expect precision.json -- accelerate launch train.py

From Python, and in notebooks: `with zerodrift.observe(model, optimizer) as seen: ...`, `seen.table()`.
"""

RUN = """\
Run a command in which `import deepspeed` is zerodrift, in each of its Python processes.

Nothing of the command is changed, and DeepSpeed need not be installed. Keys that are added must not
contradict the config that the command passes. The plan is printed as ever. Exit code: the command's; 2 where
its Python processes could not be reached.

\b
Examples:
  zerodrift run -- torchrun --nproc-per-node 8 train.py
  zerodrift run -- accelerate launch --config_file zero3.yaml train.py
  zerodrift run -- deepspeed --num_gpus 8 train.py --deepspeed ds.json
  zerodrift run --pin '*.router.*' -- trl sft --config sft.yaml
  zerodrift run --set precision.reduce=fp32 -- llamafactory-cli train sft.yaml
"""

DIFF = """\
Compare two tables that `check --save` wrote, parameter by parameter and column by column.

Exit code 3: they differ.

\b
Example:
  zerodrift diff before.json after.json
"""

AUDIT = """\
Measure what every dtype of a model costs in log-probabilities, and which pins buy it back.

Every cell is estimated in three passes; what is worth most is replayed, one cell at a time; pins are taken
while they fit the budget, each set is run, and the rules to paste are printed. What is not as it should be is
told first. Under torchrun every rank takes its share.

\b
Examples:
  zerodrift audit job.yaml
  zerodrift audit config.yaml --model path/to/model --data ids.npy \\
    --html audit.html
  zerodrift audit config.yaml --model package.module:function \\
    --budget 0.5% --of wire
"""

DRIFT = """\
Compare a trainer with a sampler, and show which difference their drift comes from.

The trainer's model is run on the tokens with each cell of the other side in turn: with its tensors, its
dtypes, and all of them but one. Tensors that are not the bits that were trained are named first. Without a
table, the other side computes as the trainer does. Exit code 0: within the bar; 2: nothing to compare; 3:
above it, or a tensor is not what was trained.

\b
Examples:
  zerodrift drift config.yaml --model path/to/model \\
    --weights runs/a --sent exported --tokens ids.npy
  zerodrift drift config.yaml --model path/to/model \\
    --sampler vllm.yaml --tokens ids.jsonl
  zerodrift drift precision.json --model path/to/model \\
    --recorded server.jsonl --tokens server.jsonl
"""

INSPECT = """\
Show what is in a checkpoint: step, plan, tensors, sizes, and whether it is complete.

Exits with code 2 if it is not complete.

\b
Examples:
  zerodrift inspect runs/a
  zerodrift inspect runs/a/checkpoints/step-00000200 --verify
  zerodrift inspect runs/a/export
"""

CONVERT = """\
Convert weights, together with masters, moments and counters where both formats have them.

The kind of SOURCE is detected and printed. One process converts a few megabytes at a time. With --model,
safetensors files get the names, layout and config that transformers loads; without it they keep the
module's own names.

--merge makes one model of trained adapters and their base, in the base's dtype or in --dtype.

\b
Examples:
  zerodrift convert runs/a merged --merge         (a run with `model.lora`)
  zerodrift convert runs/a exported --model path/to/model --dtype bf16
  zerodrift convert ds_run converted              (to continue training)
  zerodrift convert ds_run exported --to safetensors --model path/to/model
  zerodrift convert path/to/model start --to checkpoint
"""

TRAIN = """\
Train a model as a job file says, with checkpoints, a report, and the exported model at the end.

Resumes from the newest checkpoint in the run's folder, if there is one. Under torchrun or srun it joins
the ranks that were started. Ctrl-C finishes the current step, saves, and exits with 130; a second Ctrl-C
stops at once. --dry-run checks everything up to the first step and starts nothing.

\b
Examples:
  zerodrift train examples/jobs/pretrain.yaml
  zerodrift train job.yaml --dry-run
  zerodrift train job.yaml --nproc 2 --set run.steps=100 \\
    --set config.zero_optimization.stage=2
  torchrun --nproc-per-node=8 -m zerodrift train job.yaml
"""

EVALUATE = """\
Evaluate a checkpoint of a job on what it holds out, and train nothing.

Prints the validation loss that training reports at the same checkpoint, its perplexity, and what the model
writes after `run.samples`. It is the newest checkpoint, or the one that `run.resume` names; without one the
model as it is before its first step. Other data to validate with can be named.

\b
Examples:
  zerodrift evaluate job.yaml
  zerodrift evaluate job.yaml --set run.resume=step-00000200
  zerodrift evaluate job.yaml --set data.validation=path/to/other/text
"""

DATA = """\
Show what a job is trained on, without training: files, documents and tokens, what was cut or left out and
why, what is held out, and the first three blocks with what is learned marked.

Blocks are packed as for training, which then finds them in the cache of the run's folder.

\b
Examples:
  zerodrift data job.yaml
  zerodrift data job.yaml --set data.train=chats.jsonl --set data.block=1024
"""

REPLAY = """\
Compute steps of a run once more, and say where bits first differ from what it recorded.

The run must have been trained with `run.digest_every`. Under `precision.reduce: {order: tree}` the bits are
the same on any number of processes, so steps of many can be replayed on one. Exit code 3: other bits.

\b
Examples:
  zerodrift replay runs/demo
  zerodrift replay runs/demo --from 80 --to 160 --nproc 1
"""

SAMPLE = """\
Continue a prompt with a trained model, to see what it has learned.

RUN is the folder of a run, its export, its checkpoints or one of them, from whatever working folder. Of a run
that has not finished, its newest checkpoint is used.

\b
Examples:
  zerodrift sample runs/demo --prompt 'def '
  zerodrift sample runs/chat --chat --prompt 'Who are you?' --temperature 0
"""

EXAMPLES = """\
List the examples with what each of them shows, or copy them to a folder of your own.

\b
Examples:
  zerodrift examples
  zerodrift examples --copy
"""

DOCTOR = """\
Show what this machine has to train with: versions and whether they are tested, devices, carriers between
ranks, the compiler; what is slow here, and why. A product of small matrices is timed; nothing is changed.

\b
Examples:
  zerodrift doctor
  zerodrift doctor --json
"""
