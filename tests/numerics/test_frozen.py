"""Frozen parameters in a narrow format are rounded by that format only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zerodrift
from tests.numerics.networks import GPT
from tests.numerics.runs import Run, config, make, masters, require_alike, train
from tests.ranks.harness import on_ranks
from zerodrift.dtypes import ADMITTED, SHORT, DType
from zerodrift.kernels import narrow
from zerodrift.plan import cost

FORMATS = {next((word for word in SHORT if SHORT[word] is d), str(d)): d for d in ADMITTED["frozen"]}


def adapted(decoded: DType | None = None) -> GPT:
    """Return a GPT with frozen linear layers, rounded to a format if one is named."""
    torch.manual_seed(0)
    model = GPT(moe=True)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "head":
            module.weight.requires_grad_(False)
            if decoded is not None:
                module.weight.copy_(narrow.round_trip(decoded, module.weight))
    return model


def run(stage: int, mode: str, frozen: str | None, decoded: DType | None = None) -> Run:
    written = config(stage, mode, precision={"frozen": frozen})
    return train(make(written, adapted(decoded)), 2)


@pytest.mark.cells(1)
@pytest.mark.parametrize("frozen", FORMATS)
@pytest.mark.parametrize("mode", ["bf16", "autocast-bf16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", [1, 2, 4])
@on_ranks("world", timeout=200)
def test_a_run_has_the_bits_of_one_on_decoded_values(world: int, stage: int, mode: str, frozen: str) -> None:
    plain = run(stage, mode, None, FORMATS[frozen])
    require_alike(run(stage, mode, frozen), plain)
    exact, held = (adapted(each).state_dict() for each in (None, FORMATS[frozen]))
    assert not all(torch.equal(exact[name], held[name]) for name in exact)


@on_ranks(2)
def test_a_write_encodes_the_blocks_that_it_changes() -> None:
    for stage in (0, 3):
        written = config(stage, "bf16", precision={"frozen": "fp8", "storage": "fp32"})
        engine = make(written, adapted())
        name = "layers.0.attention.qkv.weight"
        before = engine.parameter(name).master
        with engine.gathered(write=True) as values:
            values[name].view(-1)[300] = 7.0
        after = engine.parameter(name).master
        differs = (after != before).view(-1, 128).any(1).nonzero().view(-1).tolist()
        before.view(-1)[300] = 7.0
        given, kept = (values.view(-1, 128)[300 // 128] for values in (before, after))
        assert differs == [300 // 128] and torch.equal(kept, narrow.round_trip(DType.FP8_128, given))
        engine.destroy()


class Wide(torch.nn.Module):
    """A frozen base of 32 million elements with a trained vector."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2048, 4096, bias=False) for _ in range(4))
        self.bias = torch.nn.Parameter(torch.ones(4096))
        self.layers.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (sum(layer(x) for layer in self.layers) + self.bias).square().mean()


def resident(line: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{line}:")[2].split()[0])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak of a process in /proc")
@pytest.mark.second
@on_ranks(2, timeout=200)
def test_a_base_is_loaded_into_its_format_with_little_beside_it(tmp_path: Path) -> None:
    names = [f"layers.{number}.weight" for number in range(4)]
    generator = torch.Generator().manual_seed(0)
    if torch.distributed.get_rank() == 0:
        tensors = {name: torch.randn(4096, 2048, generator=generator).bfloat16() for name in names}
        save_file({**tensors, "bias": torch.ones(4096)}, tmp_path / "model.safetensors")
        del tensors
    torch.distributed.barrier()
    with zerodrift.empty():
        model = Wide()
    base = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    engine = make(config(3, "bf16", precision={"frozen": "nf4"}), model, weights=tmp_path)
    peak, share = resident("VmHWM") - base, cost(engine.plan).rest.storage
    assert share < 4 * 4096 * 2048 * 0.6 / 2
    assert peak < share + 60e6, f"{peak / 1e6:.0f} MB for {share / 1e6:.0f} MB at rest"
    first = torch.randn(4096, 2048, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    with engine.gathered(names[:1]) as values:
        assert torch.equal(values[names[0]], narrow.round_trip(DType.NF4_64, first).bfloat16())


def quantised_by(name: str, folder: Path) -> DType:
    """Write a base of Wide's shapes in the form of a library; return its narrow format."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(256, 256, generator=generator) for _ in range(2)]
    tensors: dict[str, torch.Tensor] = {"bias": torch.ones(256)}
    for number, weight in enumerate(weights):
        key = f"layers.{number}.weight"
        if name == "deepseek":
            tensors[key] = weight.to(torch.float8_e4m3fn)
            tensors[f"{key}_scale_inv"] = torch.rand(2, 2, generator=generator)
        else:
            tensors[key] = (40 * weight).round().to(torch.int8)
            tensors[f"{key}_scale"] = torch.rand(256, 1, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    return DType.FP8_128 if name == "deepseek" else DType.INT8_256


@pytest.mark.parametrize("name", ["deepseek", "compressed-tensors"])
@on_ranks(2, timeout=100)
def test_a_quantised_base_keeps_its_values_in_its_own_format_alone(name: str, tmp_path: Path) -> None:
    dtype = quantised_by(name, tmp_path) if torch.distributed.get_rank() == 0 else None
    torch.distributed.barrier()
    masters_of = []
    for stage, frozen in ((3, None), (3, "fp8" if name == "deepseek" else "int8"), (1, "nf4")):
        with zerodrift.empty():
            model = Wide()
            model.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(2))
            model.bias = torch.nn.Parameter(torch.ones(256))
            model.layers.requires_grad_(False)
        written = config(stage, "bf16", precision={"frozen": frozen, "storage": "fp32"})
        engine = make(written, model, weights=tmp_path)
        masters_of.append(masters(engine))
        row = engine.plan.row("layers.0.weight")
        assert row is not None
        why = row.columns.reasons()["storage"]
        if frozen == "nf4":
            assert "decoded in fp32" in why
        elif frozen is not None:
            assert "with the codes and scales of the checkpoint" in why
            assert dtype is None or row.columns.storage.dtype is dtype
        engine.destroy()
    plain, kept, encoded = masters_of
    require_alike(kept, plain)
    for key, value in plain.items():
        assert key == "bias" or torch.equal(encoded[key], narrow.round_trip(DType.NF4_64, value))
