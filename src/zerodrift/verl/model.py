"""The model that verl's `model` block names, as its own engines have it: patched, or with a new head.

Invariant: a language model without an adapter takes no memory here; its weights are read by the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForTokenClassification
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils.model import get_hf_auto_model_class

from zerodrift.api import empty
from zerodrift.errors import UnsupportedError, first_line


def empty_model(given: Any) -> nn.Module:
    """A language model, whose weights are still in its folder."""
    build = get_hf_auto_model_class(hf_config=given.hf_config)
    with empty():
        model = build.from_config(
            given.hf_config, dtype=given.hf_config.dtype, trust_remote_code=given.trust_remote_code
        )
    return _patched(model, given)


def read_model(given: Any) -> nn.Module:
    """With its weights: one that gets an adapter, or has a new head."""
    build, config = get_hf_auto_model_class(hf_config=given.hf_config), given.hf_config
    if given.model_type == "value_model":
        build = AutoModelForTokenClassification
        if type(config) not in build._model_mapping:
            raise UnsupportedError(
                "model.path",
                "must be of an architecture that `transformers` can give a head for each token",
                got=str(config.architectures),
            )
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
    model = build.from_pretrained(
        given.local_path, dtype=torch.float32, config=config, trust_remote_code=given.trust_remote_code
    )
    return _patched(model, given)


def _patched(model: Any, given: Any) -> nn.Module:
    if given.use_liger:
        from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model, fused_linear_cross_entropy=False, swiglu=True)
    try:
        apply_monkey_patch(model=model, use_remove_padding=given.use_remove_padding, ulysses_sp_size=1)
    except (AssertionError, AttributeError, KeyError, NotImplementedError) as error:
        raise UnsupportedError(
            "model.path",
            "must be of an architecture that verl can patch",
            got=f"{type(model).__name__}: {first_line(error)}",
        ) from error
    if given.enable_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    patched: nn.Module = model
    return patched
