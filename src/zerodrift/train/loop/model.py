"""Build the model of a job: weights, adapters, frozen parameters, recomputation and loss.

A source is a folder with a `transformers` config and perhaps weights, a config file alone, or a function. The
blocks that are recomputed and compiled are the units of the plan, which are also what is gathered.

The model is equal on every rank. Random weights depend on the seed alone.
"""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from zerodrift.api import empty
from zerodrift.comm.collectives import Collectives
from zerodrift.errors import ModelError, Problems, UnsupportedError, did_you_mean
from zerodrift.model import safetensors
from zerodrift.model.document import listed
from zerodrift.model.factory import attempt, call, is_factory, make
from zerodrift.model.huggingface import CONFIG, is_installed, read_config
from zerodrift.pipeline.cut import Parts
from zerodrift.train.data.blocks import IGNORED
from zerodrift.train.data.hub import advice, name_in_cache
from zerodrift.train.job import Model
from zerodrift.train.tools.adapters import add_adapters


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The model that a job names."""

    text: str
    config: Path | None
    """The `config.json`; None for a function."""
    weights: Path | None
    """The folder of safetensors; None for random weights."""


def source_of(written: Model) -> ModelSource:
    """Resolve `model.source` and `model.weights`."""
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


def build(written: Model, source: ModelSource) -> nn.Module:
    """Return the model in training mode.

    A model of `transformers` has no memory for its parameters yet: the engine reads or draws each rank's own
    slices.
    """
    torch.manual_seed(written.seed)  # for first values, drawn here or by the engine
    if source.config is None:
        model = make(source.text)
    elif written.lora is None:
        with empty():
            model = _from_config(source, None)
    else:
        model = add_adapters(whole_model(written, source), written.lora)
    _freeze(model, written)
    model.train()
    return model


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


def whole_model(written: Model, source: ModelSource) -> nn.Module:
    """Return the model with its weights in this process's memory, without adapters."""
    torch.manual_seed(written.seed)
    return make(source.text) if source.config is None else _from_config(source, source.weights)


def streamed_weights(written: Model, source: ModelSource) -> Path | None:
    """Return the weights for the engine to read; None with adapters, which rename modules."""
    return source.weights if written.lora is None else None


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


def _from_config(source: ModelSource, weights: Path | None) -> nn.Module:
    where = source.text
    if not is_installed():
        must, todo = "`transformers` must be installed to build a model", "Run `pip install 'zerodrift[hf]'`."
        raise ModelError(where, must, got="no such package", do=todo)
    with quiet():
        from transformers import AutoModelForCausalLM

        assert source.config is not None
        read = functools.partial(read_config, source.config)
        config: Any = attempt(read, where, "must be a config that `transformers` can read")
        config.use_cache = False
        if weights is not None:
            return load_pretrained(weights, "auto", config)
        if source.weights is None:
            # First values are drawn in fp32, so that a master has all their bits.
            config.dtype = torch.float32
        from_config = functools.partial(AutoModelForCausalLM.from_config, config)
        return attempt(from_config, where, "must be a config that a model can be built from")


def load_pretrained(folder: Path, dtype: Any, config: Any = None) -> nn.Module:
    """Return the model of a folder with all its weights."""
    with quiet():
        from transformers import AutoModelForCausalLM

        # `output_loading_info` changes the type of the result.
        load: Any = functools.partial(
            AutoModelForCausalLM.from_pretrained,
            str(folder),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **({} if config is None else {"config": config}),
        )
        model, report = attempt(load, str(folder), "must hold the weights of its config")
    other = [str(mismatch[0]) for mismatch in report.get("mismatched_keys") or ()]
    require_whole(folder, [*report["missing_keys"], *other], report["unexpected_keys"])
    return cast(nn.Module, model)


def require_whole(folder: Path, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    """Refuse missing weights, which would silently stay at first values, and unknown ones."""
    problems = Problems()
    if names := sorted(missing):
        must = "must hold every tensor of the model, in its shape"
        problems.add(str(folder), must, got=f"none of {listed(names)}")
    if names := sorted(unexpected):
        problems.add(str(folder), "must hold no tensor that the model lacks", got=listed(names))
    problems.raise_as(ModelError)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the reports and progress bars of `transformers`: whatever matters is raised."""
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
        return smoothed_loss(logits, labels, self._share)

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


def smoothed_loss(logits: torch.Tensor, labels: torch.Tensor, share: float) -> torch.Tensor:
    """Return the mean over labels, which are not shifted; fp32."""
    return F.cross_entropy(
        logits[..., :-1, :].float().flatten(0, -2),
        labels[..., 1:].flatten(),
        ignore_index=IGNORED,
        label_smoothing=share,
    )


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
