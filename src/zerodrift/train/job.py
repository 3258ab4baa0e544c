"""Every key of a job file: model, data, length and output of a run.

Precision, sharding, optimizer, schedule and batch sizes are the engine's, under `config`, with the keys of
`docs/config.md` or as the path of a DeepSpeed JSON. `job_file` reads a file into a `Job`. The docstring under
a key describes it, and makes the reference page. A `Job` holds plain values: printed as JSON and read back it
is the same.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zerodrift.config import Block, Flag, Natural, Positive, PositiveFloat

HeldOutShare = Annotated[float, Field(ge=0, le=0.5, strict=True)]
"""A share of the documents."""

Paths = str | tuple[str, ...]
"""One path or several."""


class Lora(Block):
    """Low-rank adapters, through `peft`: only they are trained.

    `zerodrift convert --merge` merges them into their model.
    """

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Their scale is `alpha` over `rank`. Default twice the rank."""
    dropout: HeldOutShare = 0.0
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ()
    """Last components of the names of the linear modules that get one. Default: all but the head."""


class Model(Block):
    """The model to train."""

    source: str
    """A folder with a `transformers` config and perhaps safetensors, a `config.json`, or
    `package.module:function`."""
    weights: Literal["auto", "load", "random"] = "auto"
    """`load` reads the folder's safetensors, `random` starts from the model's own initialisation; `auto`
    loads where there is something to load."""
    parts: str = ""
    """How `config.pipeline` cuts a model of your own: `package.module:function` of a function that returns
    `zerodrift.Parts`. `transformers` models do not need it."""
    seed: Natural = 0
    """Seed of random weights, which are the same on any number of ranks."""
    activation_checkpointing: Flag = True
    """Recompute the activations of a block in its backward instead of keeping them."""
    compile: Flag = False
    """Apply `torch.compile` to each block."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained, as globs on their whole names, such as `*.embed_tokens.*` or
    `model.layers.[01].*`."""
    lora: Lora | None = None
    """Train adapters instead of the model."""
    base: Literal["", "nf4", "int8", "fp8", "mxfp8", "int4", "mxfp4", "nf4-64-bf16", "int4-64-bf16"] = ""
    """The format in which linear layers that are not trained rest and travel, such as `nf4` for the base of
    adapters: `precision.frozen` of the config."""


class DataSet(Block):
    """One of several sets of data that are mixed."""

    path: Paths = ""
    """Files, folders or globs, as `data.train` names them."""
    weight: PositiveFloat = 1.0
    """Its share of the blocks that are trained on, beside the weights of the others. A set that is used up
    begins again, in another order."""


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
    numbers, `files` a document per file, whatever is in it. `auto` looks into the files, and at the first
    row: `prompt` and `completion` that are texts are joined as they are, and `chat` puts them into the chat
    template."""
    field: str = ""
    """The column of rows that has the text. Default `text`, or the only one that has texts."""
    messages: str = "messages"
    """The column that has the conversation, a list of `role` and `content`, or of `from` and `value`. Rows
    with `conversations`, `prompt` and `completion` of turns, `instruction` and `output`, or `question` and
    `answer` and the like are conversations too."""
    pattern: str = ""
    """Glob on file names in folders, such as `*.py`. Default: every file with a known suffix."""
    tokenizer: str = "auto"
    """`bytes` (256 bytes and an end), or a folder with a tokenizer; `auto` takes the one in the model's
    folder, else bytes."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """Dtype of a `.bin` file of tokens; a `.npy` file says its own."""
    block: Annotated[Natural, Field(ge=2, le=1 << 24)] = 512
    """Tokens of a sample."""
    pack: Flag | None = None
    """Put several documents into a block: texts are concatenated and cut, conversations stay whole. If false,
    each document is a block, cut or padded. Default true for text, false for conversations and prompts."""
    group_by_length: Flag = False
    """Blocks of like length share a micro-batch, which is cut to the longest, so that little padding is
    computed. Every block still comes once in an epoch."""
    attend: Literal["block", "document"] = "block"
    """The tokens that a token of a packed block sees: all before it in the block, or only those of its own
    document, whose positions then start at 0."""
    loss_on: Literal["answers", "everything"] = "answers"
    """The tokens of a conversation that are learned: those of the assistant, or all."""
    label_smoothing: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.0
    """The share of each label that is spread over the vocabulary, in training and not in evaluations."""
    cache: str = ""
    """Folder for packed blocks, which are found again by their content. Default `cache` next to the run's
    folder."""
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
    """The first of them, counted from 1."""
    steps: Positive = 3
    """How many."""

    @property
    def last(self) -> int:
        return self.from_ + self.steps - 1


class Run(Block):
    """Length of the run, and what it writes when."""

    folder: str = ""
    """Folder for everything that the run writes. Default `runs/` and the name of the job file."""
    steps: Positive | None = None
    """Optimizer steps. Default: as many as `epochs` takes."""
    epochs: PositiveFloat = 1.0
    """Passes over the data, if `steps` is not given."""
    seed: Natural = 0
    """Seed of random operations inside the model, such as dropout."""
    nproc: Positive | None = None
    """Processes to start on this machine, unless a launcher did. Default one per GPU, or one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses GPUs if there are any."""
    evaluate_every: Natural = 0
    """Steps between evaluations; 0 evaluates only at the end."""
    evaluate_blocks: Positive | None = None
    """The most blocks of an evaluation, the first of those that are held out. Default all of them."""
    samples: tuple[str, ...] = ()
    """Prompts that the model continues at every evaluation and at the end, by its likeliest tokens, for the
    page of the run. Where all data are conversations, each is a question in the chat template."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints; 0 saves only at the end or when the run is stopped."""
    asynchronous_checkpoints: Flag = False
    """Train on while a checkpoint is written. Its state is copied first, into as much memory of the host."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    resume: str = "auto"
    """`auto` resumes from the newest checkpoint in the folder, `never` starts over. Or the tag of a
    checkpoint in the folder, or the path of any other."""
    export: Flag = True
    """Export the model as safetensors at the end, into `export` of the folder."""
    export_every: Natural = 0
    """Steps between exports, into `exports/step-N` of the folder; 0 for none. All of them are kept."""
    export_best: Flag = False
    """Export the model into `best` of the folder after every evaluation that is the best so far."""
    patience: Natural = 0
    """End after so many evaluations in a row that were not the best so far; 0 never does."""
    log_every: Positive = 1
    """Steps between printed lines if there is no terminal; metrics are written for every step."""
    digest_every: Natural = 0
    """Steps between digests of the state and the gradients in the metrics, which `zerodrift replay` compares;
    0 for none. Each takes about as long as an update. Checkpoints have one anyway. torch's deterministic
    operations are on in a run with digests, and operations that have no such form are refused."""
    max_skips: Natural = 5
    """How many steps in a row may be skipped because a loss or gradient is not finite. Overflows of a dynamic
    loss scale do not count."""
    profile: Profile | None = None
    """Record some steps, into `traces` of the folder: a Chrome trace of each rank."""
    check_precision: Flag = True
    """Compare the dtypes of the first step with the plan, and stop if they differ."""
    tensorboard: Flag = False
    """Write TensorBoard events into the folder; needs `tensorboard`."""
    wandb: str = ""
    """Weights & Biases project to log to; needs `wandb`."""


class AuditSteps(Block):
    """Steps at which to estimate the cost of rounding."""

    at: tuple[Positive, ...] = ()
    """Steps after which one more forward and backward estimates what each dtype costs, for the report and the
    metrics. The run keeps its bits."""


class Job(Block):
    """A job file."""

    model: Model
    """The model to train."""
    data: Data
    """The data to train on."""
    run: Run = Run()
    """Length of the run, and what it writes when."""
    audit: AuditSteps = AuditSteps()
    """Steps at which to estimate the cost of rounding."""
    config: dict[str, Any] | str = Field(default_factory=dict)
    """The engine's config: keys from `docs/config.md`, or the path of a YAML or DeepSpeed JSON file."""
    auto: dict[str, Any] = Field(default_factory=dict)
    """Numbers for keys of the config that are "auto", by dotted key. The total number of steps is filled in
    automatically."""
