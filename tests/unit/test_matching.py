"""A checkpoint compared with a model: all errors at once, exceptions that are allowed, and every byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.unit.refusals import error_of
from zerodrift.dtypes import DType
from zerodrift.errors import ModelError
from zerodrift.model.module import from_module
from zerodrift.model.safetensors import list_tensors
from zerodrift.weights import reader
from zerodrift.weights.boxes import Layout, within
from zerodrift.weights.load import SafetensorsWeights
from zerodrift.weights.matching import Strict, dtypes, expected_tensors
from zerodrift.weights.reader import SafetensorsReader


class Small(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.steps = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("table", torch.zeros(3), persistent=False)


def state() -> dict[str, torch.Tensor]:
    shapes = {"embed.weight": (6, 4), "inner.weight": (4, 4), "inner.bias": (4,), "mean": (4,)}
    steps = {"steps": torch.tensor([3, 4], dtype=torch.int32)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | steps


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder


def open_(folder: Path, strict: Strict = True, model: nn.Module | None = None) -> SafetensorsWeights:
    model = model or Small()
    spec = from_module(model)
    expected = expected_tensors(spec.parameters, spec.buffers, model)
    return SafetensorsWeights(folder, model, expected, strict)


def refusal(folder: Path, strict: Strict = True, model: nn.Module | None = None) -> str:
    return error_of(ModelError, open_, folder, strict, model)


def filled(files: SafetensorsWeights, name: str, numel: int, **like: torch.dtype) -> torch.Tensor:
    out = torch.empty(numel, **like)
    files.fill(name, 0, out)
    return out


def test_what_fits_is_found_and_read(tmp_path: Path) -> None:
    tensors = state()
    files = open_(write(tmp_path, tensors))
    assert set(files.match.filled) == set(tensors)
    assert files.match.missing == files.match.unexpected == []
    for name, tensor in tensors.items():
        assert torch.equal(filled(files, name, tensor.numel(), dtype=tensor.dtype), tensor.view(-1))
    part = torch.empty(7)
    files.fill("embed.weight", 9, part)
    assert torch.equal(part, tensors["embed.weight"].view(-1)[9:16])
    assert dtypes(files.match)["steps"] is DType.INT32


def test_everything_that_is_wrong_is_listed_at_once(tmp_path: Path) -> None:
    tensors = state()
    del tensors["inner.weight"], tensors["mean"]
    tensors |= {"extra.a": torch.zeros(2), "extra.b": torch.zeros(2)}
    tensors["embed.weight"] = torch.randn(5, 4)
    tensors["inner.bias"] = torch.zeros(4, dtype=torch.float64)
    tensors["steps"] = torch.zeros(2)
    text = refusal(write(tmp_path, tensors))
    for said in (
        *("weights of", "5 problems", "got no `inner.weight`, `mean`", "got `extra.a`, `extra.b`", "fp64"),
        "`embed.weight`: must have shape [6, 4]; got [5, 4] in the files",
        "`inner.bias`: must be in a floating dtype of at most 32 bits",
        "`steps`: must be int32 in the files; got fp32 of `steps`",
    ):
        assert said in text


@pytest.mark.parametrize(
    ("strict", "missing", "extra"),
    [(True, True, True), (["inner.*"], False, True), (["extra.?"], True, False)],
)
def test_strictness_is_by_pattern(tmp_path: Path, strict: Strict, missing: bool, extra: bool) -> None:
    tensors = state() | {"extra.a": torch.zeros(2)}
    del tensors["inner.weight"]
    text = refusal(write(tmp_path, tensors), strict)
    assert ("inner.weight" in text) == missing and ("extra.a" in text) == extra
    files = open_(tmp_path, strict=False)
    assert files.match.missing == ["inner.weight"] and files.match.unexpected == ["extra.a"]
    text = refusal(write(tmp_path, state()), ["iner.weight"])
    assert "must match a name in the model or in the files; got 'iner.weight'. Did you mean" in text


def test_what_a_model_declares_is_allowed(tmp_path: Path) -> None:
    class Declares(Small):
        _keys_to_ignore_on_load_missing = (r"inner\.bias",)
        _keys_to_ignore_on_load_unexpected = (r"^mtp\.",)

    tensors = state() | {"mtp.0.weight": torch.zeros(2)}
    del tensors["inner.bias"]
    files = open_(write(tmp_path, tensors), model=Declares())
    assert files.match.missing == ["inner.bias"] and files.match.unexpected == ["mtp.0.weight"]


def test_tied_names(tmp_path: Path) -> None:
    """A tied parameter may be there under either name, or under both with equal values."""
    tensors = state()
    values = tensors.pop("embed.weight")
    both = tensors | {"embed.weight": values, "head.weight": values.clone()}
    for written in (tensors | {"head.weight": values}, both):
        files = open_(write(tmp_path, written))
        assert torch.equal(filled(files, "embed.weight", 24), values.view(-1))
    both["head.weight"][5, 3] += 1
    files = open_(write(tmp_path, both))
    filled(files, "embed.weight", 23)  # the part that agrees
    with pytest.raises(ModelError, match=r"`embed\.weight`: must have the values of `head\.weight`"):
        filled(files, "embed.weight", 24)
    open_(tmp_path, model=Small(tied=False))


def test_quantized_tensors_and_buffers_that_would_be_rounded_are_refused_by_name(tmp_path: Path) -> None:
    tensors = state()
    tensors["inner.weight"] = tensors["inner.weight"].to(torch.float8_e4m3fn)
    write(tmp_path, tensors)
    tensors["inner.weight_scale_inv"] = torch.ones(3, 3)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    text = refusal(write(tmp_path, tensors), strict=False)
    assert "`inner.weight`: must have a floating scale for all of it" in text
    assert "fp32 [3, 3] in `inner.weight_scale_inv` for [4, 4]" in text
    del tensors["inner.weight_scale_inv"]
    text = refusal(write(tmp_path, {**tensors, "inner.weight": torch.ones(4, 4, dtype=torch.int8)}))
    assert "must be of a checkpoint that is not quantized; got 'fp8'" in text
    (tmp_path / "config.json").unlink()
    # A buffer is never rounded.
    model = Small()
    model.mean = model.mean.bfloat16()
    text = refusal(write(tmp_path, state()), model=model)
    assert "`mean`: must be at most bf16 in the files, the dtype of the buffer; got fp32" in text


# --- the reader -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [64, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_and_chunked_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(reader, "CHUNK", chunk)
    monkeypatch.setattr(reader, "SEEK", 16)
    tensor = torch.randn(5, 12, 7)
    (found,) = list_tensors(write(tmp_path, {"x": tensor}))
    layout = Layout.of(0, (5, 12, 7)).permute((0, 2, 1))
    flat = tensor.transpose(1, 2).reshape(-1).to(dtype)
    for start, stop in [(0, 420), (13, 14), (50, 333), (84, 168)]:
        read = SafetensorsReader()
        out = torch.full((420,), 99.0, dtype=dtype)
        for box in within(layout.boxes(), start, stop):
            read.read(found, box, out)
        assert read._buffer.numel() <= chunk and torch.equal(out[start:stop], flat[start:stop])
        assert bool((out[:start] == 99).all()) and bool((out[stop:] == 99).all())
        assert read.count >= 4 * (stop - start)
        read.close()


def test_a_file_that_is_cut_short_after_its_header_was_read(tmp_path: Path) -> None:
    (found,) = list_tensors(write(tmp_path, {"x": torch.randn(1000)}))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    read = SafetensorsReader()
    with pytest.raises(ModelError, match="an end at byte"):
        read.read(found, Layout.of(0, (1000,)).boxes()[0], torch.empty(1000))
