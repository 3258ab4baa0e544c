"""Weights for a sampler: whole tensors in the dtypes of the `export` column, each with a digest.

Invariant: all tensors that are handed out together are of one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from verl.utils.fsdp_utils import replace_lora_wrapper
from verl.utils.model import convert_weight_keys
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from zerodrift.engine.digest import tensor_digest
from zerodrift.engine.engine import Engine
from zerodrift.errors import RankError, UnsupportedError
from zerodrift.weights.export import whole_values

Weights = Iterator[tuple[str, torch.Tensor]]


def model_weights(engine: Engine, kind: str) -> Weights:
    """By the names in the folder of a model of this kind; of the model beneath, where there is an adapter."""
    adapter = adapter_of(engine)

    def named(name: str) -> str | None:
        if adapter is None:
            return name
        if "lora_" in name:
            return None
        return replace_lora_wrapper(
            name.removeprefix("base_model.model.").replace(".base_layer", ""), adapter
        )

    for own, value in unfuse_moe_params(_whole(engine, named), kind):
        (name,) = convert_weight_keys({own: value}, engine.module)
        yield name, value


def adapter_weights(engine: Engine) -> Weights:
    """By the names in the folder of an adapter."""
    return _whole(
        engine,
        lambda name: name.replace(".default.", ".").replace(".default", "") if "lora_" in name else None,
    )


def adapter_of(engine: Engine) -> Any:
    """Its settings, or None."""
    return getattr(engine.module, "peft_config", {}).get("default")


def _whole(engine: Engine, named: Callable[[str], str | None]) -> Weights:
    """What gets a name, a unit at a time. Every rank takes all of it."""
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
    """The same, each with its digest in `sent`; an error where weights change between two of them."""
    before = changes()

    def read() -> Weights:
        for name, value in weights:
            if changes() != before:
                raise UnsupportedError(
                    "get_per_tensor_param",
                    "must be read to its end before weights change",
                    got=f"an update after {len(sent)} tensors",
                    do="Send the weights, then train.",
                )
            sent[name] = tensor_digest(name, value)
            yield name, value

    return read()


def digests_of(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Of what a sampler was given, or holds, by name."""
    return {name: tensor_digest(name, value) for name, value in weights}


def require_same(sent: Mapping[str, str], held: Mapping[str, str]) -> None:
    """Raise where a sampler holds other tensors than it was sent."""
    wrong = sorted(name for name in sent.keys() | held.keys() if sent.get(name) != held.get(name))
    if wrong:
        raise RankError(
            "sampler",
            "must hold the weights that it was sent",
            got=f"other bits in {len(wrong)} of {len(sent)} tensors, `{wrong[0]}` first",
            do="Look for what casts them on their way, or loads them under other names.",
        )
