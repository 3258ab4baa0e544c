"""Checkpoints of real architectures, written by `save_pretrained`, load as with `from_pretrained`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.numerics.runs import config, masters, require_alike
from tests.ranks.harness import run_ranks
from zerodrift.api import empty, initialize
from zerodrift.errors import ModelError
from zerodrift.model import recipe
from zerodrift.model.safetensors import list_tensors
from zerodrift.policy.decisions import Master

pytest.importorskip("transformers", reason="needs the extra `hf`: transformers")

from tests.models.architectures import ARCHITECTURES, Architecture, labelled, of_type

MODELS = {**ARCHITECTURES, "mixtral": Architecture(lambda: of_type("mixtral", 2), "*.gate.*")}


def saved(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = MODELS[name].model().to(dtype)
    model.save_pretrained(folder, max_shard_size="50KB")
    return model


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_loads_as_from_pretrained_does(tmp_path: Path, name: str) -> None:
    saved(name, tmp_path)
    run_ranks(compare, 2, name, tmp_path)


def compare(name: str, folder: Path) -> None:
    losses = set()
    want = type(MODELS[name].model()).from_pretrained(folder)  # type: ignore[attr-defined]
    state = {key: value.float() for key, value in want.state_dict().items()}
    rules = [{"match": MODELS[name].routers, "pin": "fp32"}] if MODELS[name].routers else []
    for stage in (0, 3):
        with empty():
            model = MODELS[name].build()
        written = config(stage, "bf16", precision={"rules": rules})
        engine = initialize(model, config=written, weights=folder, device="cpu", quiet=True)
        found = masters(engine)
        require_alike(found, {key: state[key] for key in found})
        require_alike(dict(engine.module.named_buffers()), dict(want.named_buffers()))
        loss = engine(**labelled(0)).loss
        engine.backward(loss)
        engine.step()
        losses.add(loss.item())
    assert len(losses) == 1, losses


def core_loading() -> Any:
    """Return a private module of `transformers` 5."""
    return pytest.importorskip("transformers.core_model_loading", reason="transformers 4 has one layout")


def _names(folder: Path) -> list[str]:
    return [tensor.name for tensor in list_tensors(folder)]


def single(model: nn.Module, folder: Path) -> Any:
    return initialize(model, config=config(3, "bf16"), weights=folder, device="cpu", quiet=True)


def in_its_own_form(name: str, folder: Path) -> nn.Module:
    """Write a plain state dict, whose experts are stacked."""
    model = MODELS[name].model()
    save_file({k: v.clone() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    return model


def of_the_base_model(name: str, folder: Path) -> nn.Module:
    """Write a checkpoint without the prefix; the head, which is tied, comes with the embedding."""
    core_loading()
    want: Any = MODELS[name].model()
    want.model.save_pretrained(folder)
    return want


@pytest.mark.parametrize(
    ("name", "write", "around"),
    [
        ("qwen3-moe", saved, contextlib.nullcontext),  # a model that has memory
        ("qwen3-moe", in_its_own_form, empty),
        ("llama", of_the_base_model, empty),
    ],
)
def test_files_in_other_forms_load_the_same(name: str, write: Any, around: Any, tmp_path: Path) -> None:
    want = write(name, tmp_path)
    if write is not in_its_own_form:
        assert not want.state_dict().keys() >= {tensor.name for tensor in list_tensors(tmp_path)}
    with around():
        model = MODELS[name].build()
    given = {key: value.detach().float() for key, value in want.named_parameters()}
    require_alike(given, masters(single(model, tmp_path)))


def test_an_operation_that_is_no_move_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading = core_loading()
    saved("qwen3-moe", tmp_path)

    def doubled(self: Any, input_dict: dict[str, Any], **rest: Any) -> dict[str, Any]:
        return {key: [tensor * 2 for tensor in tensors] for key, tensors in input_dict.items()}

    monkeypatch.setattr(loading.MergeModulelist, "convert", doubled)
    with empty():
        model = MODELS["qwen3-moe"].build()
    with pytest.raises(ModelError) as caught:
        single(model, tmp_path)
    assert "model.layers.0.mlp.experts.down_proj" in str(caught.value)
    assert "MergeModulelist of `transformers` is not a move of elements: `mul`" in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_models_without_memory_start_from_their_own_distribution(name: str) -> None:
    with empty():
        model = MODELS[name].build()
    plain = MODELS[name].model()
    assert recipe.list_obstacles(model.named_parameters()) == []
    for (buffer, ours), (other, theirs) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert buffer == other and torch.equal(ours, theirs)
    engine = initialize(model, config=config(3, "bf16"), device="cpu", quiet=True)
    for row in engine.plan.rows:
        ours, theirs = engine.parameter(row.name).master, plain.get_parameter(row.name).detach()
        assert ours.shape == theirs.shape
        if row.numel > 500 or theirs.std() == 0:
            assert abs(ours.std() - theirs.std()) <= 0.15 * theirs.std(), row.name
            assert abs(ours.mean() - theirs.mean()) <= 5 * theirs.std() / row.numel**0.5, row.name


def test_what_an_architecture_keeps_in_fp32_is_built_so(tmp_path: Path) -> None:
    """The correction bias of DeepSeek-V3's router is a buffer that a bf16 config must not round."""
    want: Any = type(saved("deepseek-v3", tmp_path, torch.bfloat16))
    want = want.from_pretrained(tmp_path, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    want.get_buffer(name).copy_(torch.linspace(0.1, 0.9, 4))
    want.save_pretrained(tmp_path)
    with empty():
        model = type(want)._from_config(want.config)
    built, kept = ({key: t.dtype for key, t in each.state_dict().items()} for each in (model, want))
    assert built == kept and model.lm_head.weight.dtype is torch.bfloat16
    engine = single(model, tmp_path)
    assert torch.equal(engine.module.get_buffer(name), want.get_buffer(name))
    trained = [row for row in engine.plan.rows if row.columns.update is not None]
    split = [row for row in trained if row.columns.update.master is Master.SPLIT]
    assert split
    for row in split:
        assert torch.equal(engine.parameter(row.name).master, want.get_parameter(row.name).detach().float())
