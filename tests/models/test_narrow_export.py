"""Exports in narrow formats: a plain loop over masters has their bits, and libraries read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, which is not installed")

import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import zerodrift as zd
from tests.models.architectures import ARCHITECTURES, SIZES, since
from tests.numerics.runs import make
from tests.ranks.harness import run_ranks
from zerodrift.checkpoint import Checkpoints
from zerodrift.dtypes import NF4
from zerodrift.weights import ConvertOptions, convert

FORMATS = ("fp8-128x128", "fp8-row", "int8-row", "nf4")
FP8 = torch.float8_e4m3fn
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj")


def model() -> Any:
    sizes = {**SIZES, "hidden_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**sizes, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=128)
    return Qwen3MoeForCausalLM(config)


def config_of(stage: int, **precision: Any) -> dict[str, Any]:
    return {
        "precision": {"mode": "bf16", "rules": [{"match": "*.mlp.gate.*", "pin": "fp32"}], **precision},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    }


def export_all(stages: tuple[int, ...], root: str) -> int:
    """Export each format at every stage; at the first, save a checkpoint too."""
    ranks = 0
    for stage in stages:
        engine = make(config_of(stage), model())
        ranks = engine.mesh.size("world")
        for dtype in FORMATS:
            zd.export(engine, Path(root) / f"{ranks}-{stage}" / dtype, dtype=dtype)
        if stage == stages[0]:
            Checkpoints(engine, Path(root) / f"{ranks}-checkpoint").save()
    return ranks


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("narrow")
    run_ranks(export_all, 1, (0, 3), str(path), timeout=180)
    run_ranks(export_all, 2, (0, 3), str(path), timeout=180)
    yield path


def matrices(dtype: str) -> dict[str, torch.Tensor]:
    """Return the fp32 masters of the narrow matrices, in the form of the files."""
    state, found = model().state_dict(), {}
    for name, value in state.items():
        if name.endswith(tuple(f"{end}.weight" for end in LINEAR)):
            found[name] = value
        elif ".experts." in name and dtype != "nf4":
            stem, kind = name.rsplit(".", 1)
            for number, matrix in enumerate(value):
                parts = matrix.chunk(2) if kind == "gate_up_proj" else (matrix,)
                kinds = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
                found |= {f"{stem}.{number}.{k}.weight": p for k, p in zip(kinds, parts, strict=True)}
    return found


def plain_loop(dtype: str, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (codes, scales, decoded values), one block at a time."""
    rows, columns = matrix.shape
    tall, wide = {"fp8-128x128": (128, 128), "nf4": (1, 64)}.get(dtype, (1, columns))
    blocks = matrix.view(-1, 64) if dtype == "nf4" else matrix
    codes = torch.empty(blocks.shape, dtype={"int8-row": torch.int8, "nf4": torch.uint8}.get(dtype, FP8))
    decoded = torch.empty(blocks.shape)
    down, across = -(-blocks.shape[0] // tall), -(-blocks.shape[1] // wide)
    scales = torch.empty(down, across)
    table = torch.tensor(NF4)
    for row in range(down):
        for column in range(across):
            place = slice(tall * row, tall * (row + 1)), slice(wide * column, wide * (column + 1))
            block = blocks[place]
            scale = block.abs().max() / {"int8-row": 127.0, "nf4": 1.0}.get(dtype, 448.0)
            if dtype == "nf4":
                code = (block[..., None] / scale - table).abs().argmin(-1)
                number = table[code]
            else:
                code = (block / scale).round() if dtype == "int8-row" else block / scale
                number = code.to(codes.dtype).float()
            codes[place], scales[row, column], decoded[place] = code.to(codes.dtype), scale, number * scale
    if dtype == "nf4":
        flat = codes.view(-1, 2)
        return (flat[:, :1] << 4) | flat[:, 1:], scales.view(-1), decoded.view(rows, columns)
    return codes, scales, decoded


SCALES = {"fp8-128x128": "_scale_inv", "nf4": ".absmax"}


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_matrix_has_the_bits_of_a_plain_loop_over_its_master(root: Path, dtype: str) -> None:
    held = load_file(root / "1-0" / dtype / "model.safetensors")
    expected = matrices(dtype)
    assert len(expected) == (4 if dtype == "nf4" else 13)
    for name, matrix in expected.items():
        codes, scales, _ = plain_loop(dtype, matrix)
        assert torch.equal(held.pop(name).view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(held.pop(f"{name}{SCALES.get(dtype, '_scale')}"), scales), name
    others = {tensor.dtype for name, tensor in held.items() if "quant_" not in name and "gate." not in name}
    assert others == {torch.bfloat16} and held["model.layers.0.mlp.gate.weight"].dtype is torch.float32


@pytest.mark.parametrize("dtype", FORMATS)
def test_no_byte_depends_on_stage_or_ranks(root: Path, dtype: str) -> None:
    def files(where: str) -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in (root / where / dtype).iterdir()}

    first = files("1-0")
    assert set(first) == {"model.safetensors", "config.json", "generation_config.json"}
    for where in ("1-3", "2-0", "2-3"):
        assert files(where) == first, where


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_checkpoint_is_converted_to_the_same_matrices(root: Path, dtype: str, tmp_path: Path) -> None:
    source = root / "1-0" / dtype
    held = load_file(source / "model.safetensors")
    convert(root / "2-checkpoint", tmp_path / "out", ConvertOptions(dtype=dtype), model=str(source))
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == held.keys()
    for name in (name for name in held if name.startswith(tuple(matrices(dtype)))):
        assert torch.equal(found[name].view(torch.uint8), held[name].view(torch.uint8)), name


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_was_exported_is_read_and_exported_again_with_the_same_bytes(
    root: Path, dtype: str, tmp_path: Path
) -> None:
    source = root / "2-3" / dtype
    engine = make(config_of(0, export=dtype), model(), weights=source)
    stacks = {"gate_up_proj": [], "down_proj": []}
    for name, matrix in matrices(dtype).items():
        decoded = plain_loop(dtype, matrix)[2]
        if ".experts." not in name:
            assert torch.equal(engine.parameter(name).master, decoded), name
        else:
            stacks["down_proj" if "down_proj" in name else "gate_up_proj"].append(decoded)
    for kind, parts in stacks.items():
        if parts:
            master = engine.parameter(f"model.layers.0.mlp.experts.{kind}").master
            assert torch.equal(master.reshape(-1), torch.cat(parts).reshape(-1)), kind
    zd.export(engine, tmp_path / "again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


READERS = {"fp8-128x128": "accelerate", "nf4": "bitsandbytes"}


@since("5.20")
@pytest.mark.parametrize("dtype", ["fp8-128x128", "fp8-row", "nf4"])
def test_from_pretrained_has_the_decoded_values(root: Path, dtype: str) -> None:
    """The libraries' own code decodes on a CPU. `transformers` has no experts in int8."""
    library = pytest.importorskip(READERS.get(dtype, "compressed_tensors"), reason="is not installed")
    folder, more = root / "1-0" / dtype, {}
    if dtype.startswith("fp8"):
        block = json.loads((folder / "config.json").read_text())["quantization_config"]
        kind = "FineGrainedFP8Config" if dtype == "fp8-128x128" else "CompressedTensorsConfig"
        more["quantization_config"] = getattr(transformers, kind)(**{**block, "dequantize": True})
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **more
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    decoded = {name: plain_loop(dtype, matrix)[2] for name, matrix in matrices(dtype).items()}
    for name in (name for name in decoded if ".experts." not in name):
        weight = loaded.get_parameter(name)
        if dtype == "nf4":
            weight = library.functional.dequantize_4bit(weight.data, weight.quant_state)
            decoded[name] = decoded[name].bfloat16()  # by the state's dtype
        assert torch.equal(weight, decoded[name]), name
    if dtype.startswith("fp8"):
        experts = torch.stack([values for name, values in decoded.items() if ".down_proj" in name])
        assert torch.equal(loaded.model.layers[0].mlp.experts.down_proj, experts)


def test_a_stack_that_stays_one_in_the_files_is_refused_by_name(tmp_path: Path) -> None:
    engine = make(config_of(0, rules=[]), ARCHITECTURES["gpt-oss"].model())
    with pytest.raises(zd.ZerodriftError) as caught:
        zd.export(engine, tmp_path / "out", dtype="fp8-row")
    assert "experts.gate_up_proj`: must be a matrix in the files" in str(caught.value)
    assert "Give its parameter a rule with a plain `export`." in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_rule_widens_and_narrows(tmp_path: Path) -> None:
    rules = [{"match": "*.experts.*", "export": "bf16"}, {"match": "lm_head.*", "export": "fp8-row"}]
    exported = zd.export(make(config_of(0, export="fp8-row", rules=rules), model()), tmp_path / "out")
    assert dict(exported.dtypes)["fp8-row"] == 5
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["quantization_config"]["ignore"] == ["model.layers.0.mlp.experts"]
