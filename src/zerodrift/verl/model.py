"""The model of verl's `model` block, and its weights for a sampler with a digest of every tensor.

Invariants: a language model without an adapter takes no memory here, because the engine reads its weights.
All tensors that are handed out together belong to one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys, get_hf_auto_model_class
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from zerodrift.api import empty
from zerodrift.engine.digest import tensor_digest
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError, UnsupportedError, first_line
from zerodrift.weights.export import whole_values

Weights = Iterator[tuple[str, torch.Tensor]]


def prepared_model(given: Any) -> tuple[nn.Module, Any]:
    """Build a language model without weights, and return the path of its weights; or read a model that gets
    an adapter or has a new head."""
    build, config = get_hf_auto_model_class(hf_config=given.hf_config), given.hf_config
    if given.model_type == "language_model" and not given.lora_rank:
        with empty():
            model = build.from_config(config, dtype=config.dtype, trust_remote_code=given.trust_remote_code)
        return _patched(model, given), given.local_path
    if given.model_type == "value_model":
        build = AutoModelForTokenClassification
        if type(config) not in build._model_mapping:
            must = "must be of an architecture that `transformers` can give a head for each token"
            raise UnsupportedError("model.path", must, got=str(config.architectures))
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    model = build.from_pretrained(
        given.local_path, dtype=torch.float32, config=config, trust_remote_code=given.trust_remote_code
    )
    return _patched(model, given), None


def _patched(model: Any, given: Any) -> nn.Module:
    if given.use_liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    try:
        apply_monkey_patch(model=model, use_remove_padding=given.use_remove_padding, ulysses_sp_size=1)
    except (AssertionError, AttributeError, KeyError, NotImplementedError) as error:
        must, got = (
            "must be of an architecture that verl can patch",
            f"{type(model).__name__}: {first_line(error)}",
        )
        raise UnsupportedError("model.path", must, got=got) from error
    if given.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patched: nn.Module = model
    return patched


# --- weights for a sampler --------------------------------------------------------------------------------


def adapter_of(engine: Engine) -> Any:
    """Return the settings of an adapter, or None."""
    return getattr(engine.module, "peft_config", {}).get("default")


def model_weights(engine: Engine, kind: str) -> Weights:
    """Yield the weights by the names in a model's folder. Under an adapter they are the base model's."""
    adapter = adapter_of(engine)

    def named(name: str) -> str | None:
        if adapter is None:
            return name
        base = name.removeprefix("base_model.model.").replace(".base_layer", "")
        return None if "lora_" in name else replace_lora_wrapper(base, adapter)

    for own, value in unfuse_moe_params(_whole(engine, named), kind):
        (name,) = convert_weight_keys({own: value}, engine.module)
        yield name, value


def adapter_weights(engine: Engine) -> Weights:
    """Yield the adapter's weights by the names in its folder."""

    def named(name: str) -> str | None:
        return name.replace(".default.", ".").replace(".default", "") if "lora_" in name else None

    return _whole(engine, named)


def _whole(engine: Engine, named: Callable[[str], str | None]) -> Weights:
    """Yield whole tensors that get a name, one unit at a time. All ranks must take all of them."""
    for unit in engine.plan.units:
        rows = [engine.plan.rows[index] for index in unit.rows]
        rows = [row for row in rows if named(row.name) is not None]
        for row, value in zip(rows, whole_values(engine, rows), strict=True):
            assert value is not None
            for to in map(named, row.names):
                if to is not None:
                    yield to, value
    for path, module in engine.module.named_modules():
        for own, buffer in module.named_buffers(path, recurse=False):
            name = named(own)
            kept = own.rpartition(".")[2] not in module._non_persistent_buffers_set
            if kept and name is not None:
                yield name, buffer.detach().clone()


def counted(weights: Weights, sent: dict[str, str], changes: Callable[[], int]) -> Weights:
    """Add the digest of each tensor to `sent`. Raise if weights change between two tensors."""
    before = changes()

    def read() -> Weights:
        for name, value in weights:
            if changes() != before:
                must, got = (
                    "must be read to its end before weights change",
                    f"an update after {len(sent)} tensors",
                )
                raise UnsupportedError(
                    "get_per_tensor_param", must, got=got, do="Send the weights, then train."
                )
            sent[name] = tensor_digest(name, value)
            yield name, value

    return read()


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return the digests of a sampler's tensors by name."""
    return {name: tensor_digest(name, value) for name, value in weights}


def require_same(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise if a sampler holds other tensors than it was sent."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        got = f"other bits in {len(wrong)} of {len(sent)} tensors, `{wrong[0]}` first"
        do = "Look for what casts them on their way, or loads them under other names."
        raise RankError("sampler", "must hold the weights that it was sent", got=got, do=do)
