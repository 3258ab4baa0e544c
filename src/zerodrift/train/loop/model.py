"""Build the model of a job: weights, adapters, frozen parameters, recomputation and loss.

Check it against the data: its vocabulary, its positions, and what its tokens see.

A source is a folder with a `transformers` config and perhaps weights, a config file alone, or a function. The
blocks that are recomputed and compiled are the units of the plan, which are also what is gathered.

The model is equal on every rank. Random weights depend on the seed alone.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from zerodrift.api import empty
from zerodrift.comm import Collectives
from zerodrift.engine import Engine
from zerodrift.errors import ConfigError, ModelError, Problems, UnsupportedError, did_you_mean
from zerodrift.model import (
    CONFIG,
    attempt,
    call,
    is_factory,
    make,
    quiet,
    read_config,
    require_installed,
    safetensors,
)
from zerodrift.pipeline import Parts
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.files import advice, name_in_cache
from zerodrift.train.data.sampling import BatchLayout, MicroBatch
from zerodrift.train.data.tokenizer import Tokenizer
from zerodrift.train.job import Job, Lora, Model
from zerodrift.train.loop.step import losses_of
from zerodrift.weights import fill_module

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "block_size")
"""Names of the longest text in configs."""
LEAK = 0.02
"""Largest effect of another document on a loss, relative to the effect of its own: rounding."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    text: str
    config: Path | None
    """The `config.json`; None for a function."""
    weights: Path | None
    """The folder of safetensors; None for random weights."""


def source_of(written: Model) -> ModelSource:
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
        todo = f"Run `hf download {cached[1]}`, or set `model.weights: random`."
        raise ModelError("model.source", must, got=got, do=todo)
    return ModelSource(written.source, config, path if there and written.weights != "random" else None)


def build(written: Model) -> nn.Module:
    """Return the model in training mode.

    A model of `transformers` has no memory for its parameters yet: the engine reads or draws each rank's own
    slices. Except that adapters on random weights need those in memory.
    """
    source = source_of(written)
    torch.manual_seed(written.seed)  # for first values, drawn here or by the engine
    if source.config is None:
        model = make(source.text)
    elif written.lora is None or source.weights is not None:
        with empty():
            model = _from_config(source)
            model = model if written.lora is None else add_adapters(model, written.lora)
    else:
        model = add_adapters(whole_model(written), written.lora)
    _freeze(model, written)
    model.train()
    return model


def require_peft(where: str) -> None:
    if importlib.util.find_spec("peft") is None:
        must, todo = "needs `peft`, which reads and makes adapters", "Run `pip install 'zerodrift[peft]'`."
        raise ModelError(where, must, got="no such package", do=todo)


def add_adapters(model: nn.Module, lora: Lora) -> nn.Module:
    require_peft("model.lora")
    if not hasattr(model, "config"):
        raise UnsupportedError("model.lora", "must go with a `transformers` model", got=type(model).__name__)
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha or 2 * lora.rank,
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with quiet():
        return attempt(lambda: get_peft_model(model, config), "model.lora", "must fit the model")


def _freeze(model: nn.Module, written: Model) -> None:
    """Freeze the parameters of `model.freeze`; a tied parameter matches by any of its names."""
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


def whole_model(written: Model) -> nn.Module:
    """Return the model with its weights in this process's memory, without adapters."""
    source = source_of(written)
    torch.manual_seed(written.seed)
    if source.config is None:
        return make(source.text)
    if source.weights is None:
        return _from_config(source)
    with empty():
        model = _from_config(source)
    fill_module(model, source.weights)
    return model


def parts(written: Model) -> Parts | None:
    """Return how the owner of a model cuts it for a pipeline."""
    if not written.parts:
        return None
    parts_made = call(written.parts, "`zerodrift.Parts`")
    if not isinstance(parts_made, Parts):
        must, got = "must be a function that returns `zerodrift.Parts`", type(parts_made).__name__
        raise ModelError("model.parts", must, got=got)
    return parts_made


def prepare(model: nn.Module, blocks: list[str], written: Model) -> None:
    """Compile and recompute the blocks; `blocks` are the paths of the plan's units."""
    modules = [model.get_submodule(path) for path in blocks if path]
    if written.compile:
        for block in modules:
            block.forward = torch.compile(block.forward)
    if not written.activation_checkpointing:
        return
    # `transformers` 4 uses the second name.
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


def _from_config(source: ModelSource) -> nn.Module:
    where = source.text
    require_installed(where, "a model's config")
    with quiet():
        from transformers import AutoModelForCausalLM

        assert source.config is not None
        read = functools.partial(read_config, source.config)
        config: Any = attempt(read, where, "must be a config that `transformers` can read")
        config.use_cache = False
        if source.weights is None:
            # First values are drawn in fp32, so that a master has all their bits.
            config.dtype = torch.float32
        from_config = functools.partial(AutoModelForCausalLM.from_config, config)
        return attempt(from_config, where, "must be a config that a model can be built from")


# --- label smoothing --------------------------------------------------------------------------------------


class SmoothedLoss:
    """The loss function of a causal language model, with labels smoothed where gradients are needed.

    Models of `transformers` call a function that can be replaced, also in the last stage of a pipeline, and
    add the losses of routers to it. Evaluations keep the plain loss, so that perplexity means the same in
    every run. The smoothed loss is that of `transformers.trainer_pt_utils.LabelSmoother`.
    """

    def __init__(self, share: float, plain: Callable[..., torch.Tensor]) -> None:
        self.was_called = False
        self._share, self._plain = share, plain

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        self.was_called = True
        if not torch.is_grad_enabled():
            return self._plain(logits, labels, *args, **rest)
        return F.cross_entropy(
            logits[..., :-1, :].float().flatten(0, -2),
            labels[..., 1:].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self._share,
        )

    def require_called(self, comm: Collectives, model: nn.Module) -> None:
        """Require after the first step that the model of some rank has called this loss. Collective."""
        if not any(comm.all_gather_object(self.was_called)):
            raise self.refusal(model)

    def refusal(self, model: nn.Module) -> UnsupportedError:
        must = "must be 0 for a model whose loss is not the `loss_function` of `transformers`"
        got, todo = type(model).__name__, "Smooth in the model's own loss."
        return UnsupportedError("data.label_smoothing", must, got=got, do=todo)

    def __deepcopy__(self, memo: dict[int, Any]) -> SmoothedLoss:
        return self  # shared by the stages of a model, of which one calls it


def smooth_loss(model: nn.Module, share: float) -> SmoothedLoss | None:
    """Replace a model's loss by a smoothed one; return None if `share` is 0."""
    if not share:
        return None
    inside: Any = model
    inside = inside.get_base_model() if hasattr(inside, "get_base_model") else inside  # with adapters
    plain: Any = getattr(inside, "loss_function", None)
    loss = SmoothedLoss(share, plain)
    if getattr(plain, "__name__", "") != "ForCausalLMLoss":
        raise loss.refusal(inside)
    inside.loss_function = loss
    return loss


# --- checks against the data --------------------------------------------------------------------------


def check_model(model: nn.Module, job: Job, letters: Tokenizer) -> None:
    """Refuse a model that does not fit the job's tokenizer and blocks, or is no causal language model."""
    check_causal(model, job.model.source)
    check_vocabulary(model, letters.vocabulary, letters.name)
    check_positions(model, job.data.block)


def check_vocabulary(model: nn.Module, tokens: int, name: str) -> None:
    """Refuse tokens that the model has no embedding for."""
    embeddings = getattr(model, "get_input_embeddings", None)
    try:
        embedding = embeddings() if embeddings is not None else None
    except (NotImplementedError, AttributeError):
        embedding = None
    if isinstance(embedding, nn.Embedding) and embedding.num_embeddings < tokens:
        must = f"must make tokens that the model knows, below {embedding.num_embeddings}"
        todo = "Use the model's own tokenizer, or a config with a larger `vocab_size`."
        raise ModelError("data.tokenizer", must, got=f"{name} with {tokens}", do=todo)


def positions(model: nn.Module) -> int | None:
    """Return the longest text that the model was made for; None if its config does not say."""
    return _named_positions(model)[1]


def _named_positions(model: nn.Module) -> tuple[str, int | None]:
    text = _text_config(model)
    values = text if isinstance(text, Mapping) else {name: getattr(text, name, None) for name in _POSITIONS}
    known = ((name, values.get(name)) for name in _POSITIONS)
    return next(((name, value) for name, value in known if type(value) is int and value > 0), ("", None))


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def check_positions(model: nn.Module, block: int) -> None:
    name, known = _named_positions(model)
    if known is not None and known < block:
        key = getattr(model.config, "attribute_map", {}).get(name, name)
        must = f"must be at most the {known:,} positions of the model's config (`{key}`)"
        todo = "Lower it, or raise that where the model can."
        raise ModelError("data.block", must, got=f"{block:,}", do=todo)


def check_causal(model: nn.Module, source: str) -> None:
    """Refuse an encoder: its tokens see those that follow, which are what they are to predict."""
    text = _text_config(model)
    if text is None:
        return
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


def require_document_mask(engine: Engine, seat: BatchLayout, length: int, vocabulary: int) -> None:
    """Refuse `data.attend: document` for a model that lets documents of a block see each other.

    Collective. The model gets positions that start again with each document, from which those of
    `transformers` make a mask. Some have no mask, and carry a state from one document into the next.
    """
    where, todo, name = "data.attend", "Use `data.attend: block`.", type(engine.module).__name__
    if engine.plan.policy.pipeline is not None:
        raise ConfigError(where, "must be `block` with `config.pipeline`", got="'document'", do=todo)
    must = "must be `block` for this model"
    arguments = inspect.signature(engine.module.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in arguments):
        raise ConfigError(where, must, got=f"{name}, whose `forward` takes no `position_ids`", do=todo)
    # Blocks of two documents: plain, with other first ones, and with other starts of the second. One change
    # can leave a loss as it is by chance, so there are several.
    half, rest = length // 2, length - length // 2
    learned = half + max(1, rest // 2)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (seat.micro, length))
    labels, places = tokens.copy(), np.broadcast_to(np.r_[np.arange(half), np.arange(rest)], tokens.shape)
    labels[:, :learned] = IGNORED

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(seat.device)

    batches = [MicroBatch(on_device(tokens), on_device(labels), 1.0, np.arange(0), on_device(places))]
    for (start, end), shift in itertools.product(((0, half), (half, learned)), (1, 2, 3)):
        changed = tokens.copy()
        changed[:, start:end] = (changed[:, start:end] + shift) % vocabulary
        batches.append(replace(batches[0], tokens=on_device(changed)))
    first, *changes = losses_of(engine, batches).tolist()
    other, own = (max(abs(loss - first) for loss in some) for some in (changes[:3], changes[3:]))
    if other > LEAK * own:
        raise ConfigError(where, must, got=f"{name}, in which a document sees the one before it", do=todo)
