"""Every key of a job file: which model, which data, how long, and where things go.

Precision, sharding, optimizer, schedule and batch sizes are not here: they are the engine's, under
`config`, with the keys of `docs/config.md` or as the path of a DeepSpeed JSON. `read` makes a `Job` of a
file; what a key does is told by the docstring under it, and the reference page is made of those.

Invariant: plain values only. A `Job` can be printed as JSON and read back to the same `Job`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from zerodrift.config.schema import Block, Flag, Natural, Positive, PositiveFloat

HeldOutShare = Annotated[float, Field(ge=0, le=0.5, strict=True)]
"""Of the documents."""

Paths = str | tuple[str, ...]
"""One path or several."""


class Lora(Block):
    """Low-rank adapters, through `peft`: only they are trained."""

    rank: Positive = 8
    """Rank of the adapters."""
    alpha: Positive | None = None
    """Their scale is `alpha` over `rank`. Default twice the rank."""
    dropout: HeldOutShare = 0.0
    """Dropout before the adapters."""
    targets: tuple[str, ...] = ()
    """Last parts of the names of the linear modules that get one. Default all linear modules but the head."""


class Model(Block):
    """What is trained."""

    source: str
    """A folder with a `transformers` config and perhaps safetensors, a `config.json`, or
    `package.module:function`."""
    weights: Literal["auto", "load", "random"] = "auto"
    """`load` reads the folder's safetensors, `random` starts from the model's own initialisation; `auto`
    loads where there is something to load."""
    parts: str = ""
    """With `config.pipeline`, how a model of one's own is cut: `package.module:function` of a function that
    returns `zerodrift.Parts`. `transformers` models need none."""
    seed: Natural = 0
    """Of random weights: the same on every rank and for every number of ranks."""
    activation_checkpointing: Flag = True
    """Recompute the activations of a block in its backward rather than keep them."""
    compile: Flag = False
    """`torch.compile` for each block by itself."""
    lora: Lora | None = None
    """Train adapters instead of the model."""


class Data(Block):
    """What it is trained on."""

    train: Paths
    """Files, folders or globs: text, JSONL, parquet, or token maps (`.npy`, `.bin`)."""
    validation: HeldOutShare | Paths = 0.0
    """A share of the training documents that is held out, or files of their own. Of token maps, and where
    documents are too few for one to be held out, it is the last blocks."""
    format: Literal["auto", "text", "chat", "tokens"] = "auto"
    """`text` is one document per file or row, `chat` a conversation per row, `tokens` a map of token
    numbers. `auto` looks at names and the first row."""
    field: str = "text"
    """The key of a row that holds the text."""
    messages: str = "messages"
    """The key of a row that holds a conversation, a list of `role` and `content`. Rows with `prompt` and
    `completion`, or `instruction`, `input` and `output`, are conversations too."""
    pattern: str = ""
    """Glob on file names, for folders: `*.py`. Default every file whose suffix is known."""
    tokenizer: str = "auto"
    """`bytes` (256 bytes and an end), or a folder with a tokenizer; `auto` takes the one in the model's
    folder, else bytes."""
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    """What a `.bin` file of tokens holds; a `.npy` says so itself."""
    block: Annotated[int, Field(ge=2, le=1 << 24, strict=True)] = 512
    """Tokens of a sample."""
    pack: Flag | None = None
    """Put documents one after the other and cut blocks from that. Without it a document is a block, cut
    or padded. Default true for text, false for chat."""
    loss_on: Literal["answers", "everything"] = "answers"
    """Which tokens of a conversation are learned: the assistant's, or all."""
    cache: str = ""
    """Folder for packed blocks, found again by the content they are made of. Default `cache` beside the
    run's folder."""
    seed: Natural = 0
    """Of the split and of the order of blocks."""


class Run(Block):
    """How long, and what is written when."""

    folder: str = ""
    """Where everything goes. Default `runs/` and the name of the job file."""
    steps: Positive | None = None
    """Optimizer steps. Default those of `epochs`."""
    epochs: PositiveFloat = 1.0
    """Passes over the data, where `steps` is not given."""
    seed: Natural = 0
    """Of whatever is random inside the model, such as dropout."""
    nproc: Positive | None = None
    """Processes on this machine when no launcher started them. Default one per GPU, else one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes GPUs where there are any."""
    evaluate_every: Natural = 0
    """Steps between evaluations; 0 is at the end only."""
    evaluate_batches: Positive = 16
    """Micro-batches per rank of an evaluation, at most."""
    checkpoint_every: Natural = 0
    """Steps between checkpoints; 0 is at the end, and where the run is stopped."""
    keep: Positive = 2
    """Checkpoints that are kept, the newest."""
    resume: str = "auto"
    """`auto` goes on from the newest checkpoint of the folder, `never` starts anew; or the tag of one in it,
    or the path of another."""
    export: Flag = True
    """Write the model as safetensors at the end."""
    log_every: Positive = 1
    """Steps between lines where no terminal is; metrics are written for every step."""
    max_skips: Natural = 5
    """Steps in a row that may be skipped for a loss or gradient that is not finite. Overflows of a
    dynamic loss scale do not count."""
    check_precision: Flag = True
    """Compare the dtypes of the first step with the plan, and stop where they differ."""
    tensorboard: Flag = False
    """Write TensorBoard events into the folder; needs `tensorboard`."""
    wandb: str = ""
    """Project of Weights & Biases to log to; needs `wandb`."""


class Job(Block):
    """A job file."""

    model: Model
    """What is trained."""
    data: Data
    """What it is trained on."""
    run: Run = Run()
    """How long, and what is written when."""
    config: dict[str, Any] | str = Field(default_factory=dict)
    """The engine's config: keys of `docs/config.md`, or the path of a YAML or DeepSpeed JSON file."""
    auto: dict[str, Any] = Field(default_factory=dict)
    """Numbers for keys of the config that are "auto", by dotted key. The total number of steps is filled
    in by itself."""


Job.model_rebuild()
