"""Quantised checkpoints: values of bitsandbytes and of plain formulas, and unchanged codes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.unit.test_matching import open_, refusal
from zerodrift.api import make_plan
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import describe
from zerodrift.weights.boxes import Layout
from zerodrift.weights.load import SafetensorsWeights
from zerodrift.weights.matching import dtypes

BITSANDBYTES = Path(__file__).parent / "data/nf4.safetensors"
"""NF4 tensors with plain and with nested scales, and their values as bitsandbytes decodes them."""
FP8 = torch.float8_e4m3fn


class One(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def values(files: SafetensorsWeights, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the whole weight, read in pieces that begin anywhere."""
    flat = torch.empty(math.prod(shape))
    for start in range(0, flat.numel(), 1111):
        files.fill("weight", start, flat[start : start + 1111])
    return flat.view(shape)


def from_bitsandbytes(folder: Path, kind: str, **changed: torch.Tensor) -> Path:
    found = load_file(BITSANDBYTES)
    tensors = {n.removeprefix(f"{kind}."): t for n, t in found.items() if n.startswith(f"{kind}.")}
    save_file(tensors | changed, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_nf4_of_bitsandbytes_has_its_values_and_keeps_its_codes(kind: str, tmp_path: Path) -> None:
    theirs = load_file(BITSANDBYTES)
    expected, codes = theirs[f"decoded.{kind}"], theirs[f"{kind}.weight"].view(-1)
    files = open_(from_bitsandbytes(tmp_path, kind), model=One(24, 64))
    assert torch.equal(values(files, (24, 64)), expected)
    assert dtypes(files.match) == {"weight": DType.NF4_64}
    run = PackedRun.empty(DType.NF4_64, 1536)
    for start in range(0, 1536, 256):
        assert files.fill_packed("weight", start, run, start, 256)
    assert torch.equal(run.values().view(24, 64), expected) and torch.equal(run.codes.view(-1), codes)
    assert not files.fill_packed("weight", 0, PackedRun.empty(DType.INT4_128, 256), 0, 256)
    inside_a_block = Layout.of(0, (1536,)).narrow(0, 32, 512).boxes()
    files.match.filled["weight"] = replace(files.match.filled["weight"], boxes=inside_a_block)
    assert not files.fill_packed("weight", 0, PackedRun.empty(DType.NF4_64, 512), 0, 512)
    assert torch.equal(narrow.round_trip(DType.NF4_64, expected.view(-1)), expected.view(-1))
    if kind == "plain":  # and our own codes are theirs
        run.encode(0, theirs["source.plain"].view(-1))
        assert torch.equal(run.codes.view(-1), codes)
        assert torch.equal(run.scales.view(-1).view(torch.float32), theirs["plain.weight.absmax"])


@pytest.mark.parametrize(
    ("dtype", "shape", "scale", "kept"),
    [
        (FP8, (200, 384), (2, 3), DType.FP8_128),
        (FP8, (200, 300), (2, 3), None),
        (FP8, (200, 384), (200, 1), DType.FP8_128),
        (FP8, (24, 384), (24,), DType.FP8_128),
        (FP8, (24, 256), (1,), DType.FP8_128),
        (torch.int8, (24, 512), (24, 1), DType.INT8_256),
        (torch.int8, (24, 512), (24, 4), None),
        (FP8, (3, 130, 256), (3, 2, 2), DType.FP8_128),
        (FP8, (8, 1024), (1, 8), DType.FP8_128),
    ],
    ids=str,
)
def test_scaled_tensors_are_decoded_in_fp32_and_keep_codes_where_blocks_fit(
    dtype: torch.dtype, shape: tuple[int, ...], scale: tuple[int, ...], kept: DType | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    codes = (40 * torch.randn(shape)).clamp(-127, 127).to(dtype)
    scales = torch.rand(scale) + 0.5
    name = "weight_scale_inv" if len(shape) == len(scale) and scale[-1] not in (1, 4) else "weight_scale"
    save_file({"weight": codes, name: scales}, tmp_path / "model.safetensors")
    files = open_(tmp_path, model=One(*shape))
    wide = scales.view(*scale, 1) if len(scale) == 1 < len(shape) and scale != (1,) else scales
    for dim in (-2, -1) if scale != (1,) else ():
        times = 128 if wide.shape[dim] in (2, 3) and shape[dim] > 3 else -(-shape[dim] // wide.shape[dim])
        wide = wide.repeat_interleave(times, dim).narrow(dim, 0, shape[dim])
    expected = codes.float() * wide
    assert torch.equal(values(files, shape), expected)
    run = PackedRun.empty(DType.INT8_256 if dtype is torch.int8 else DType.FP8_128, 6144)
    assert files.fill_packed("weight", 0, run, 0, 6144) == (kept is not None)
    if kept is not None:
        assert torch.equal(run.values(), expected.view(-1)[:6144])


INT8 = {"weight": torch.zeros(8, 64, dtype=torch.int8), "weight_scale": torch.ones(8, 1)}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ("fp4", "`weight`: must be NF4, with the numbers of its definition; got fp4 of bitsandbytes"),
        (
            {"weight.absmax": torch.ones(3)},
            "must have codes for [24, 64] and 24 scales; got [3] scales",
        ),
        ({**INT8, "weight_zero_point": torch.ones(8, 1)}, "must be stored without a zero point"),
    ],
)
def test_what_cannot_be_decoded_is_refused_by_name(changed: Any, told: str, tmp_path: Path) -> None:
    if changed == "fp4":
        name = "weight.quant_state.bitsandbytes__nf4"
        saved = json.loads(bytes(load_file(BITSANDBYTES)[f"plain.{name}"].tolist()))
        text = json.dumps({**saved, "quant_type": "fp4"}).encode()
        changed = {name: torch.tensor(list(text), dtype=torch.uint8)}
    if "weight" in changed:
        save_file(changed, tmp_path / "model.safetensors")
        assert told in refusal(tmp_path, model=One(8, 64))
    else:
        assert told in refusal(from_bitsandbytes(tmp_path, "plain", **changed), model=One(24, 64))


def test_a_plan_of_files_has_the_parameters_and_says_their_format(tmp_path: Path) -> None:
    tensors = {"norm.weight": torch.ones(64).bfloat16(), "up.weight": torch.randn(200, 384).to(FP8)}
    save_file({**tensors, "up.weight_scale": torch.ones(2, 3)}, tmp_path / "fp8.safetensors")
    spec = describe(tmp_path / "fp8.safetensors")
    form = "e4m3 in tiles of 128x128 with an fp32 scale"
    assert [(p.name, p.shape, p.dtype, p.trained) for p in spec.parameters] == [
        ("norm.weight", (64,), DType.BF16, True),
        ("up.weight", (200, 384), DType.FP32, True),
    ]
    assert spec.formats == (("up.weight", form),)
    assert f"the files hold 1 tensor as {form}" in make_plan({}, spec).notes
    save_file({**tensors, "up.weight_scale": torch.ones(5, 7)}, tmp_path / "fp8.safetensors")
    with pytest.raises(ModelError, match=r"up\.weight`: must have a floating scale"):
        describe(tmp_path / "fp8.safetensors")


def test_a_plan_of_nf4_has_the_shapes_behind_the_codes(tmp_path: Path) -> None:
    spec = describe(from_bitsandbytes(tmp_path, "nested"))
    assert [(p.name, p.shape, p.trained) for p in spec.parameters] == [("weight", (24, 64), True)]
    assert spec.checkpoint == (("weight", DType.NF4_64),)
