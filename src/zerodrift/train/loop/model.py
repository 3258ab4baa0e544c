"""The model of a job: built, made to recompute activations, compiled by block, given adapters.

A source is a folder with a `transformers` config and perhaps weights, a config file by itself, or a
function. Which modules are blocks is the plan's way of finding units, so what is recomputed and compiled
is what is gathered.

Invariant: equal on every rank. Random weights depend on the seed alone.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerodrift.api import empty
from zerodrift.errors import ModelError, Problems, did_you_mean
from zerodrift.model import safetensors
from zerodrift.model.document import listed
from zerodrift.model.factory import call, is_factory, make
from zerodrift.model.huggingface import CONFIG, is_installed
from zerodrift.model.meta import attempt
from zerodrift.pipeline.cut import Parts
from zerodrift.train.data.hub import advice, download, name_in_cache
from zerodrift.train.loop.job import Model
from zerodrift.train.tools.adapters import with_adapters


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a job names as its model."""

    text: str
    config: Path | None
    """The `config.json`; None for a function."""
    weights: Path | None
    """The folder to read safetensors from; None for random weights."""


def source_of(written: Model) -> ModelSource:
    """What `model.source` and `model.weights` mean."""
    path = Path(written.source).expanduser()
    if is_factory(written.source) and not path.exists():
        if written.weights == "load":
            must = "must be `auto` or `random` for a function, which makes its own weights"
            raise ModelError("model.weights", must, got="'load'")
        return ModelSource(written.source, None, None)
    config = path / CONFIG if path.is_dir() else path
    if not config.is_file() or config.suffix != ".json":
        must = "must be a folder with a `config.json`, such a file, or `package.module:function`"
        missing = f"which is not there (looked for in {Path.cwd()})"
        got = f"{written.source!r}, {'without one' if path.exists() else missing}"
        raise ModelError("model.source", must, got=got, do=advice(written.source, "model"))
    there = path.is_dir() and safetensors.holds(path)
    if written.weights == "load" and not there:
        must, todo = "must be a folder with safetensors to load", "Set `model.weights: random`."
        raise ModelError("model.source", must, got=repr(written.source), do=todo)
    cached = name_in_cache(path)
    if cached is not None and not there and written.weights == "auto":
        must, got = "must have its weights in safetensors", f"only other files of {cached[1]}, in {path}"
        todo = f"{download(cached[1], cached[0])} Or set `model.weights: random`."
        raise ModelError("model.source", must, got=got, do=todo)
    return ModelSource(written.source, config, path if there and written.weights != "random" else None)


def build(written: Model, source: ModelSource) -> nn.Module:
    """The model, in training mode. One of `transformers` has no memory for its parameters yet: the engine
    reads or draws each rank's own slices."""
    # The seed that first values are drawn with, here or by the engine.
    torch.manual_seed(written.seed)
    if source.config is None:
        model = make(source.text)
    elif written.lora is None:
        with empty():
            model = _from_config(source, None)
    else:
        model = with_adapters(whole_model(written, source), written.lora)
    _freeze(model, written)
    model.train()
    return model


def _freeze(model: nn.Module, written: Model) -> None:
    """Stop training what the job says; a parameter with two names by either."""
    if not written.freeze:
        return
    problems = Problems()
    if written.lora is not None:
        problems.add("model.freeze", "must be empty with `model.lora`", got=", ".join(written.freeze))
    named = list(model.named_parameters(remove_duplicate=False))
    for glob in written.freeze:
        found = [parameter for name, parameter in named if fnmatch.fnmatchcase(name, glob)]
        if not found:
            todo = did_you_mean(glob, dict(named)) or f"The first is called `{named[0][0]}`." if named else ""
            problems.add("model.freeze", "must match parameters of the model", got=repr(glob), do=todo)
        for parameter in found:
            parameter.requires_grad_(False)
    if named and not any(parameter.requires_grad for _, parameter in named):
        problems.add("model.freeze", "must leave parameters to train", got="all of them")
    problems.raise_as(ModelError)


def whole_model(written: Model, source: ModelSource) -> nn.Module:
    """The model with its weights in this process's own memory, without adapters."""
    torch.manual_seed(written.seed)
    return make(source.text) if source.config is None else _from_config(source, source.weights)


def streamed(written: Model, source: ModelSource) -> Path | None:
    """The weights that the engine reads; adapters wrap modules, whose names are no longer those of files."""
    return source.weights if written.lora is None else None


def parts(written: Model) -> Parts | None:
    """How a model is cut over a pipeline, where its owner says so."""
    if not written.parts:
        return None
    parts_made = call(written.parts, "`zerodrift.Parts`")
    if not isinstance(parts_made, Parts):
        must, got = "must be a function that returns `zerodrift.Parts`", type(parts_made).__name__
        raise ModelError("model.parts", must, got=got)
    return parts_made


def prepare(model: nn.Module, blocks: list[str], written: Model) -> None:
    """Make blocks recompute and compile; `blocks` are the paths of the plan's units."""
    modules = [model.get_submodule(path) for path in blocks if path]
    if written.compile:
        for block in modules:
            block.forward = torch.compile(block.forward)
    if not written.activation_checkpointing:
        return
    # The second is what `transformers` 4 calls it.
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is not None and getattr(model, "supports_gradient_checkpointing", False):
        enable({"use_reentrant": False})
        if written.lora is not None:
            # Frozen embeddings give the first block an input without a gradient.
            model.enable_input_require_grads()  # type: ignore[operator]
        return
    for block in modules:
        block.forward = functools.partial(_recomputed, block.forward, block)


def _recomputed(forward: Any, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


# --- transformers -------------------------------------------------------------------------------------


def _from_config(source: ModelSource, weights: Path | None) -> nn.Module:
    where = source.text
    if not is_installed():
        must, todo = "`transformers` must be installed to build a model", "Run `pip install 'zerodrift[hf]'`."
        raise ModelError(where, must, got="no such package", do=todo)
    with quiet():
        from transformers import AutoModelForCausalLM

        config = attempt(lambda: _config(source), where, "must be a config that `transformers` can read")
        if weights is not None:
            return loaded(weights, "auto", config)
        if source.weights is None:
            # First values are drawn in fp32, so that a master has all their bits.
            config.dtype = torch.float32
        from_config = functools.partial(AutoModelForCausalLM.from_config, config)
        return attempt(from_config, where, "must be a config that a model can be built from")


def loaded(folder: Path, dtype: Any, config: Any = None) -> nn.Module:
    """The model of a folder, with every weight out of it."""
    with quiet():
        from transformers import AutoModelForCausalLM

        given = {} if config is None else {"config": config}
        # With what it says of the weights, its type is another.
        load: Any = functools.partial(
            AutoModelForCausalLM.from_pretrained,
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **given,
        )
        model, said = attempt(load, str(folder), "must hold the weights of its config")
    other = [str(mismatch[0]) for mismatch in said.get("mismatched_keys") or ()]
    require_whole(folder, [*said["missing_keys"], *other], said["unexpected_keys"])
    return cast(nn.Module, model)


def require_whole(folder: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """What is not there is never left at first values, which nothing would show."""
    problems = Problems()
    for must, names in (
        ("must hold every tensor of the model, in its shape", missing),
        ("must hold no tensor that the model lacks", unexpected),
    ):
        if listed_names := sorted(names):
            got = f"none of {listed(listed_names)}" if names is missing else listed(listed_names)
            problems.add(str(folder), must, got=got)
    problems.raise_as(ModelError)


def _config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(source.config), trust_remote_code=False, local_files_only=True)
    config.use_cache = False
    return config


@contextmanager
def quiet() -> Iterator[None]:
    """`transformers` reports what it does while it does it; what matters is raised."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


def vocabulary(model: nn.Module) -> int | None:
    """Tokens that the model knows; None where it does not say."""
    embeddings = getattr(model, "get_input_embeddings", None)
    try:
        embedding = embeddings() if embeddings is not None else None
    except (NotImplementedError, AttributeError):
        embedding = None
    return embedding.num_embeddings if isinstance(embedding, nn.Embedding) else None


def check_vocabulary(model: nn.Module, tokens: int, name: str) -> None:
    """Refuse tokens that the model has no embedding for, before the first of them is looked up."""
    known = vocabulary(model)
    if known is not None and known < tokens:
        raise ModelError(
            "data.tokenizer",
            f"must make tokens that the model knows, below {known}",
            got=f"{name} with {tokens}",
            do="Use the model's own tokenizer, or a config with a larger `vocab_size`.",
        )


_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size")
"""What configs call how long a text may be."""


def positions(model: nn.Module) -> int | None:
    """How long a text the model was made for; None where it does not say."""
    return _positions(model)[1]


def _positions(model: nn.Module) -> tuple[str, int | None]:
    config = getattr(model, "config", None)
    text = getattr(config, "get_text_config", lambda: config)()
    values = text if isinstance(text, Mapping) else {name: getattr(text, name, None) for name in _POSITIONS}
    known = ((name, values.get(name)) for name in _POSITIONS)
    return next(((name, value) for name, value in known if type(value) is int and value > 0), ("", None))


def check_causal(model: nn.Module, source: str) -> None:
    """Refuse an encoder: its tokens see those that follow, which are what they are to predict."""
    config = getattr(model, "config", None)
    if config is None:
        return
    text = getattr(config, "get_text_config", lambda: config)()
    kind = getattr(text, "model_type", "")
    sees = getattr(text, "is_causal", None) is False or getattr(text, "causal", None) is False
    sees |= getattr(text, "use_bidirectional_attention", None) in (True, "all")
    if getattr(text, "is_decoder", None) is False and kind:
        from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as ENCODERS

        sees |= kind in ENCODERS
    if sees or kind in ("xlnet",):
        must = "must be a causal language model, whose tokens see only what is before them"
        todo = "Use a decoder, or set `is_decoder: true` in its config where it has that."
        raise ModelError("model.source", must, got=f"{source!r}, an encoder ({kind})", do=todo)


def check_positions(model: nn.Module, block: int) -> None:
    """Refuse blocks that are longer than the model's positions: some models look them up, and others were
    never trained beyond them."""
    name, known = _positions(model)
    if known is not None and known < block:
        key = getattr(model.config, "attribute_map", {}).get(name, name)
        must = f"must be at most the {known:,} positions of the model's config (`{key}`)"
        todo = "Lower it, or raise that where the model can."
        raise ModelError("data.block", must, got=f"{block:,}", do=todo)
