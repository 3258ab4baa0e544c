"""Every key of a job file: model, data, length and output of a run.

Precision, sharding, optimizer, schedule and batch sizes are keys of the engine's config under `config`, or
in a DeepSpeed JSON that it names. `job_file` reads a file into a `Job`. `docs/job.md` is made from the
docstrings under the keys. A `Job` holds plain values: written as JSON and read back it is the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zerodrift.config import Block, Flag, Natural, Positive, PositiveFloat

HeldOutShare = Annotated[float, Field(ge=0, le=0.5, strict=True)]
"""Share of the documents."""

Paths = str | tuple[str, ...]
"""One or several paths."""


class Lora(Block):
    """Train only low-rank adapters, through `peft`.

    `zerodrift convert --merge` merges the adapters into the model.
    """

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Positive | None = None
    """The scale of the adapters is `alpha` over `rank`. Default twice the rank."""
    dropout: HeldOutShare = 0.0
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ()
    """Last name components of the linear modules that get adapters. Default: all but the head."""


class Model(Block):
    """The model to train."""

    source: str
    """A folder with a `transformers` config and perhaps safetensors, a `config.json`, or
    `package.module:function`."""
    weights: Literal["auto", "load", "random"] = "auto"
    """`load` reads the folder's safetensors, `random` starts from the model's own initialisation; `auto`
    loads safetensors if there are any."""
    parts: str = ""
    """`package.module:function` of a function that returns the `zerodrift.Parts` of your own model, for
    `config.pipeline`. `transformers` models do not need it."""
    seed: Natural = 0
    """Seed of random weights. The weights are the same on any number of ranks."""
    activation_checkpointing: Flag = True
    """Recompute the activations of a block in its backward instead of keeping them."""
    compile: Flag = False
    """Apply `torch.compile` to each block."""
    freeze: tuple[str, ...] = ()
    """Globs on the whole names of parameters that are not trained, such as `*.embed_tokens.*` or
    `model.layers.[01].*`."""
    lora: Lora | None = None
    """Train adapters instead of the model."""
    base: Literal["", "nf4", "int8", "fp8", "mxfp8", "int4", "mxfp4", "nf4-64-bf16", "int4-64-bf16"] = ""
    """Narrow format of the frozen linear layers, such as `nf4` for the base of adapters: `precision.frozen`
    of the config."""


class DataSet(Block):
    """One of several data sets that are mixed."""

    path: Paths = ""
    """Files, folders or globs, as `data.train` names them."""
    weight: PositiveFloat = 1.0
    """Share of the blocks that come from this data set, relative to the weights of the others. A data set
    that is used up starts again in another order."""


class Data(Block):
    """The data to train on."""

    train: str | tuple[str | DataSet, ...]
    """Files, folders or globs: text, JSON, JSON lines, CSV, parquet, Arrow, each also compressed, or token
    maps (`.npy`, `.bin`). Or a list of blocks with `path` and `weight`, which are mixed."""
    validation: HeldOutShare | Paths = 0.0
    """The share of training documents to hold out, or separate files. For token maps, and if there are too
    few documents to hold one out, the last blocks are held out."""
    format: Literal["auto", "text", "chat", "tokens", "files"] = "auto"
    """`text` is a document per text file or row, `chat` a conversation per row, `tokens` a map of token
    numbers, `files` a document per file, whatever its content. `auto` decides by the files and the first row.
    Texts in `prompt` and `completion` are joined without a template under `auto`, and put into the chat
    template under `chat`."""
    field: str = ""
    """The column of rows that has the text. Default `text`, or the only column of texts."""
    messages: str = "messages"
    """The column that has the conversation, a list of `role` and `content`, or of `from` and `value`. Rows
    with `conversations`, `prompt` and `completion` of turns, `instruction` and `output`, or `question` and
    `answer` and the like are conversations too."""
    pattern: str = ""
    """Glob on file names in folders, such as `*.py`. Default: every file with a known suffix."""
    tokenizer: str = "auto"
    """`bytes` (256 bytes and an end token), or a folder with a tokenizer. `auto` uses the tokenizer in the
    model's folder, or bytes if there is none."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Dtype of a `.bin` file of tokens; a `.npy` file says its own."""
    block: Annotated[Natural, Field(ge=2, le=1 << 24)] = 512
    """Tokens of a sample."""
    pack: Flag | None = None
    """Put several documents into a block: texts are concatenated and cut, conversations stay whole. If false,
    each document is a block, cut or padded. Default true for text, false for conversations and prompts."""
    group_by_length: Flag = False
    """Put blocks of similar length into a micro-batch, padded to its longest block, so that there is little
    padding. Every block still comes once in an epoch."""
    attend: Literal["block", "document"] = "block"
    """Attention in a packed block: over all earlier tokens of the `block`, or only over those of the same
    `document`, whose positions then start at 0."""
    loss_on: Literal["answers", "everything"] = "answers"
    """The tokens of a conversation that are learned: those of the assistant, or all."""
    label_smoothing: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """The share of each label that is spread over the vocabulary, in training and not in evaluations."""
    cache: str = ""
    """Folder of the cache of packed blocks. Default `cache` next to the run's folder."""
    seed: Natural = 0
    """Seed of the split and of the order of blocks."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the training data, as they are written."""
        paths = [[paths] if isinstance(paths, str) else paths for paths, _ in self.sets()]
        return tuple(path for several in paths for path in several)

    def sets(self) -> list[tuple[Paths, float]]:
        """Return the paths of each set with its weight; one set if no weights are written."""
        if isinstance(self.train, str) or all(isinstance(each, str) for each in self.train):
            return [(self.train, 1.0)]  # type: ignore[list-item]
        return [(each, 1.0) if isinstance(each, str) else (each.path, each.weight) for each in self.train]


class Profile(Block):
    """Steps to record with torch's profiler."""

    from_: Positive = Field(validation_alias="from", serialization_alias="from")
    """The first step to record, counted from 1."""
    steps: Positive = 3
    """How many steps to record."""

    @property
    def last(self) -> int:
        return self.from_ + self.steps - 1


class Run(Block):
    """Length of the run, and its output."""

    folder: str = ""
    """Folder for everything that the run writes. Default `runs/` and the name of the job file."""
    steps: Positive | None = None
    """Optimizer steps. Default: as many as `epochs` takes."""
    epochs: PositiveFloat = 1.0
    """Passes over the data, if `steps` is not given."""
    seed: Natural = 0
    """Seed of random operations inside the model, such as dropout."""
    nproc: Positive | None = None
    """Processes to start on this machine, unless a launcher starts them. Default one per GPU, or one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses GPUs if there are any."""
    evaluate_every: Natural = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    evaluate_blocks: Positive | None = None
    """Number of held-out blocks to evaluate. Default all of them."""
    samples: tuple[str, ...] = ()
    """Prompts that the model continues at every evaluation and at the end, with its likeliest tokens, for
    `report.html`. If all data are conversations, each prompt is a question in the chat template."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints; 0 saves only at the end or when the run is stopped."""
    asynchronous_checkpoints: Flag = False
    """Continue training while a checkpoint is written. The state is copied first, to as much host memory."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    resume: str = "auto"
    """`auto` resumes from the newest checkpoint in the folder, `never` starts a new run. Also the tag of a
    checkpoint in the folder, or the path of another checkpoint."""
    export: Flag = True
    """Export the model as safetensors at the end, to `export` in the folder."""
    export_every: Natural = 0
    """Steps between exports to `exports/step-N` in the folder; 0 for none. All exports are kept."""
    export_best: Flag = False
    """Export the model to `best` in the folder after every evaluation that is the best so far."""
    patience: Natural = 0
    """End the run after this many evaluations in a row that were not the best so far; 0 for never."""
    log_every: Positive = 1
    """Steps between printed lines if there is no terminal; metrics are written for every step."""
    digest_every: Natural = 0
    """Steps between digests of the state and the gradients in the metrics, which `zerodrift replay` compares;
    0 for none. A digest takes about as long as an update. Every checkpoint has one in any case. A run with
    digests uses torch's deterministic operations, and refuses operations without a deterministic form."""
    max_skips: Natural = 5
    """How many steps in a row may be skipped because a loss or gradient is not finite. Overflows of a dynamic
    loss scale do not count."""
    profile: Profile | None = None
    """Record some steps: a Chrome trace of each rank, in `traces` in the folder."""
    check_precision: Flag = True
    """Compare the dtypes of the first step with the plan, and stop if they differ."""
    tensorboard: Flag = False
    """Write TensorBoard events into the folder; needs `tensorboard`."""
    wandb: str = ""
    """Weights & Biases project to log to; needs `wandb`."""


class AuditSteps(Block):
    """Steps at which to estimate the cost of rounding."""

    at: tuple[Positive, ...] = ()
    """Steps after which an additional forward and backward estimates what each dtype costs, for the report
    and the metrics. The bits of the run do not change."""


class Job(Block):
    """A job file."""

    model: Model
    """The model to train."""
    data: Data
    """The data to train on."""
    run: Run = Run()
    """Length of the run, and its output."""
    audit: AuditSteps = AuditSteps()
    """Steps at which to estimate the cost of rounding."""
    config: dict[str, Any] | str = Field(default_factory=dict)
    """The engine's config: keys from `docs/config.md`, or the path of a YAML or DeepSpeed JSON file."""
    auto: dict[str, Any] = Field(default_factory=dict)
    """Numbers for keys of the config that are "auto", by dotted key. The total number of steps is filled in
    automatically."""
