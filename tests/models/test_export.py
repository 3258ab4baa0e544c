"""`from_pretrained` loads an export with the trained values."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import zerodrift as zd
from tests.models.architectures import ARCHITECTURES, labelled, rules
from tests.numerics.runs import make
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.dtypes import DType
from zerodrift.weights.conversions import saved_form

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layout_is_what_save_pretrained_writes(name: str) -> None:
    loading = pytest.importorskip("transformers.core_model_loading", reason="transformers 4 has one layout")
    model: Any = ARCHITECTURES[name].model()
    state = model.state_dict()
    expected = loading.revert_weight_conversion(model, dict(state))
    shapes = {key: tuple(value.shape) for key, value in state.items()}
    saved = saved_form(model, shapes, dict.fromkeys(shapes, DType.FP32))
    assert {tensor.name for tensor in saved} == expected.keys()
    for tensor in saved:
        built = torch.full((tensor.numel,), float("nan"))
        for part in tensor.parts:
            part.box.of_source(built).copy_(part.box.of_target(state[part.parameter].reshape(-1)))
        assert torch.equal(built.view(tensor.shape), expected[tensor.name].float()), tensor.name


def config_of(name: str, mode: str, stage: int) -> dict[str, Any]:
    return {
        "precision": {"mode": mode, "rules": rules(name) if mode != "fp32" else []},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def train_and_export(names: list[str], root: str) -> list[dict[str, Any]]:
    """Train and export every architecture on two ranks; return its values, and whether each is pinned."""
    found = []
    for name in names:
        truth: dict[str, Any] = {}
        for mode, stage in (("fp32", 3), ("bf16", 2)):
            engine = make(config_of(name, mode, stage), ARCHITECTURES[name].model())
            for step in range(2):
                engine.backward(engine(**labelled(step, engine.mesh.rank()), use_cache=False).loss)
                engine.step()
            zd.export(engine, Path(root) / name / mode, max_shard_size="40KB")
            with engine.gathered() as values:
                pinned = {row.name for row in engine.plan.rows if row.columns.pinned}
                truth[mode] = {key: (value.clone(), key in pinned) for key, value in values.items()}
        found.append(truth)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    root = tmp_path_factory.mktemp("export")
    names = list(ARCHITECTURES)
    truths = run_ranks(train_and_export, 2, names, str(root), timeout=240)[0]
    yield root, dict(zip(names, truths, strict=True))
    shutil.rmtree(root)


Made = tuple[Path, dict[str, Any]]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_value_is_the_trained_one_and_pinned_routers_keep_every_bit(exported: Made, name: str) -> None:
    root, truths = exported
    for mode, truth in truths[name].items():
        # fp32 holds both dtypes of the files, so nothing is rounded by loading.
        model, report = AutoModelForCausalLM.from_pretrained(
            root / name / mode, dtype=torch.float32, output_loading_info=True
        )
        assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        loaded = model.state_dict()
        for key, (value, _) in truth.items():
            assert torch.equal(loaded[key], value.float()), key
    folder, files = root / name / "bf16", {}
    for path in folder.glob("*.safetensors"):
        files |= load_file(path)
    pinned = {key: value for key, (value, is_pinned) in truth.items() if is_pinned}
    assert all(files[key].dtype is torch.float32 for key in pinned)
    assert not any(torch.equal(value, value.bfloat16().float()) for value in pinned.values())
    assert sorted(pinned) == sorted(fnmatch.filter(truth, ARCHITECTURES[name].routers))
    config = AutoConfig.from_pretrained(folder)
    assert config.dtype is torch.bfloat16 and config.architectures == [type(model).__name__]
    assert GenerationConfig.from_pretrained(folder)


def test_tied_weights_are_written_once(exported: Made, tmp_path: Path) -> None:
    model = ARCHITECTURES["llama"].model()
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    index = json.loads((exported[0] / "llama" / "fp32" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == load_file(tmp_path / "model.safetensors").keys()
    assert index["weight_map"].keys() < model.state_dict().keys()


@on_ranks(2, timeout=120)
def test_an_export_is_loaded_by_ranks(exported: Made) -> None:
    """The files load through `initialize(weights=...)`, whose reader converts the other way."""
    root = exported[0]
    for name in ARCHITECTURES:
        with zd.empty():
            model = ARCHITECTURES[name].model()
        engine = make(config_of(name, "fp32", 3), model, weights=root / name / "fp32")
        zd.export(engine, root / name / "again", max_shard_size="40KB")
        before, after = (
            {path.name: path.read_bytes() for path in (root / name / folder).glob("*.safetensors")}
            for folder in ("fp32", "again")
        )
        assert before == after, name
