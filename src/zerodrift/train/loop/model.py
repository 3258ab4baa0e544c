"""Build the model of a job, and check that it fits the job's data.

A model comes from a folder with a `transformers` config and perhaps weights, from a config file alone, or
from a function. Activations are recomputed, and code is compiled, by the units that the plan gathers.

The model is the same on every rank: random weights depend only on the seed.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib.util
import inspect
import itertools
from collections.abc import Mapping
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
"""Names that configs have for the most positions of a text."""
LEAK = 0.02
"""The most that another document may change a loss, relative to the document itself: rounding."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The `model` block of a job, with the files that it names."""

    written: Model
    config: Path | None = None
    """The `config.json`; None for a function."""
    weights: Path | None = None
    """The folder of safetensors; None for random weights."""


def source_of(written: Model) -> ModelSource:
    path = Path(written.source).expanduser()
    if is_factory(written.source) and not path.exists():
        if written.weights == "load":
            must = "must be `auto` or `random` for a function, which makes its own weights"
            raise ModelError("model.weights", must, got="'load'")
        return ModelSource(written)
    config = path / CONFIG if path.is_dir() else path
    if not config.is_file() or config.suffix != ".json":
        must = "must be a folder with a `config.json`, such a file, or `package.module:function`"
        missing = f"which does not exist (looked for in {Path.cwd()})"
        got = f"{written.source!r}, {'without one' if path.exists() else missing}"
        raise ModelError("model.source", must, got=got, do=advice(written.source, "model"))
    has_weights, cached = path.is_dir() and safetensors.holds(path), name_in_cache(path)
    others = [file.name for glob in ("pytorch_model*", "consolidated*", "*.gguf") for file in path.glob(glob)]
    is_meant = written.weights == "load" or (written.weights == "auto" and (others or cached is not None))
    if is_meant and not has_weights:
        must, got = "must have its weights in safetensors", f"{others[0] if others else 'none'} in {path}"
        todo = f"Run `hf download {cached[1]}`" if cached else "Save it by `save_pretrained`"
        raise ModelError("model.source", must, got=got, do=f"{todo}, or set `model.weights: random`.")
    return ModelSource(written, config, path if has_weights and written.weights != "random" else None)


def build(source: ModelSource) -> nn.Module:
    """Return the model in training mode.

    The parameters of a `transformers` model have no memory yet: the engine reads or draws each rank's shards.
    Except under adapters on random weights, which must be in memory.
    """
    written = source.written
    is_whole = source.config is None or (written.lora is not None and source.weights is None)
    if is_whole:
        model = whole_model(source)
    else:
        torch.manual_seed(written.seed)  # for initial values, which the engine draws
        with empty():
            model = _from_config(source)
    if written.lora is not None:
        with contextlib.nullcontext() if is_whole else empty():
            model = add_adapters(model, written.lora)
    _freeze(model, written)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ModelError("model", "must leave parameters to train", got="all of them frozen, or none")
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
    problems.raise_as(ModelError)


def whole_model(source: ModelSource) -> nn.Module:
    """Return the model with its weights in this process's memory, without adapters."""
    torch.manual_seed(source.written.seed)
    if source.config is None:
        return make(source.written.source)
    if source.weights is None:
        return _from_config(source)
    with empty():
        model = _from_config(source)
    fill_module(model, source.weights)
    return model


def parts(written: Model) -> Parts | None:
    """Return the parts of a model of the user's own, for a pipeline."""
    if not written.parts:
        return None
    parts_made = call(written.parts, "`zerodrift.Parts`")
    if not isinstance(parts_made, Parts):
        must, got = "must be a function that returns `zerodrift.Parts`", type(parts_made).__name__
        raise ModelError("model.parts", must, got=got)
    return parts_made


def prepare(model: nn.Module, blocks: list[str], written: Model) -> None:
    """Compile the blocks and recompute their activations; `blocks` are the paths of the plan's units."""
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
    where = source.written.source
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
    """The loss function of a `transformers` model, with smoothed labels while gradients are computed.

    The model calls its `loss_function`, also in the last stage of a pipeline, and adds the losses of its
    routers to the result. Evaluations keep the plain loss, so perplexities of all runs can be compared. The
    smoothed loss is that of `transformers.trainer_pt_utils.LabelSmoother`.
    """

    def __init__(self, model: nn.Module, share: float) -> None:
        """Replace the loss function of a model, with or without adapters."""
        inside: Any = model
        inside = inside.get_base_model() if hasattr(inside, "get_base_model") else inside
        self.was_called = False
        self._share = share
        self._plain: Any = getattr(inside, "loss_function", None)
        if getattr(self._plain, "__name__", "") != "ForCausalLMLoss":
            raise self._refusal(inside)
        inside.loss_function = self

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **rest: Any) -> torch.Tensor:
        self.was_called = True
        if not torch.is_grad_enabled():
            loss: torch.Tensor = self._plain(logits, labels, *args, **rest)
            return loss
        return F.cross_entropy(
            logits[..., :-1, :].float().flatten(0, -2),
            labels[..., 1:].flatten(),
            ignore_index=IGNORED,
            label_smoothing=self._share,
        )

    def require_called(self, comm: Collectives, model: nn.Module) -> None:
        """Refuse a model that has not called this loss on any rank in the first step. Collective."""
        if not any(comm.all_gather_object(self.was_called)):
            raise self._refusal(model)

    @staticmethod
    def _refusal(model: nn.Module) -> UnsupportedError:
        must = "must be 0 for a model whose loss is not the `loss_function` of `transformers`"
        got, todo = type(model).__name__, "Smooth in the model's own loss."
        return UnsupportedError("data.label_smoothing", must, got=got, do=todo)

    def __deepcopy__(self, memo: dict[int, Any]) -> SmoothedLoss:
        return self  # copies of the model, as for pipeline stages, share one loss and its `was_called`


# --- checks against the data --------------------------------------------------------------------------


def check_model(model: nn.Module, job: Job, tokenizer: Tokenizer) -> None:
    """Refuse a model that does not fit the job's tokenizer and blocks, or is no causal language model."""
    check_causal(model, job.model.source)
    check_vocabulary(model, tokenizer.vocabulary, tokenizer.name)
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
    """Return the most positions that the model was made for; None if its config does not say."""
    return _named_positions(model)[1]


def _named_positions(model: nn.Module) -> tuple[str, int | None]:
    text = _text_config(model)
    for name in _POSITIONS:
        value = text.get(name) if isinstance(text, Mapping) else getattr(text, name, None)
        if type(value) is int and value > 0:
            return name, value
    return "", None


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "get_text_config", lambda: config)()


def check_positions(model: nn.Module, block: int) -> None:
    name, known = _named_positions(model)
    if known is not None and known < block:
        key = getattr(model.config, "attribute_map", {}).get(name, name)
        must = f"must be at most the {known:,} positions of the model's config (`{key}`)"
        todo = "Lower it, or raise the key of the config if the model allows it."
        raise ModelError("data.block", must, got=f"{block:,}", do=todo)


def check_causal(model: nn.Module, source: str) -> None:
    """Refuse an encoder, whose tokens see the following tokens that they should predict."""
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
        must = "must be a causal language model, whose tokens see only earlier tokens"
        todo = "Use a decoder, or set `is_decoder: true` in its config if it has this key."
        raise ModelError("model.source", must, got=f"{source!r}, an encoder ({kind})", do=todo)


def require_document_mask(engine: Engine, layout: BatchLayout, length: int, vocabulary: int) -> None:
    """Refuse `data.attend: document` for a model that lets documents of a block see each other.

    Collective. Models of `transformers` make a mask from positions that start again with each document. Some
    models ignore the positions, or carry a state from one document into the next.
    """
    where, todo, name = "data.attend", "Use `data.attend: block`.", type(engine.module).__name__
    if engine.plan.policy.pipeline is not None:
        raise ConfigError(where, "must be `block` with `config.pipeline`", got="'document'", do=todo)
    must = "must be `block` for this model"
    arguments = inspect.signature(engine.module.forward).parameters.values()
    if not any(each.name == "position_ids" or each.kind is each.VAR_KEYWORD for each in arguments):
        raise ConfigError(where, must, got=f"{name}, whose `forward` takes no `position_ids`", do=todo)
    # The loss is on the end of the second document of a block. The first three changes are in the first
    # document, the others in the second. There are several because a single one may not change the loss.
    half, rest = length // 2, length - length // 2
    learned = half + max(1, rest // 2)
    tokens = np.random.default_rng(0).integers(0, vocabulary, (layout.micro, length))
    labels, places = tokens.copy(), np.broadcast_to(np.r_[np.arange(half), np.arange(rest)], tokens.shape)
    labels[:, :learned] = IGNORED

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(layout.device)

    batches = [MicroBatch(on_device(tokens), on_device(labels), 1.0, np.arange(0), on_device(places))]
    for (start, end), shift in itertools.product(((0, half), (half, learned)), (1, 2, 3)):
        changed = tokens.copy()
        changed[:, start:end] = (changed[:, start:end] + shift) % vocabulary
        batches.append(replace(batches[0], tokens=on_device(changed)))
    first, *changes = losses_of(engine, batches).tolist()
    other, own = (max(abs(loss - first) for loss in some) for some in (changes[:3], changes[3:]))
    if other > LEAK * own:
        raise ConfigError(where, must, got=f"{name}, in which a document sees the one before it", do=todo)
