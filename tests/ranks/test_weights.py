"""Weights of safetensors on ranks: bits, bytes read, initial values, and errors that reach every rank."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config, masters
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.api import empty, initialize, load_weights
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, RankError
from zerodrift.optim.rounding import round_away
from zerodrift.policy.decisions import Master
from zerodrift.weights.reader import SafetensorsReader

STAGES = (0, 1, 2, 3)
MASTERS = {"split": ("bf16", {}), "fp32": ("bf16", {"master": "fp32"}), "same": ("fp32", {})}


def given(dtype: torch.dtype = torch.float32) -> GPT:
    """Return the model of the files: values that do not fit bf16, ties among them."""
    model = GPT(layers=1, moe=True)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            # Halfway between two bf16 values: rounded away by a split master, to even by a cast.
            parameter.view(-1)[:1] = torch.tensor(1.0 + 2.0**-8)
    return model.to(dtype)


def save(model: nn.Module, folder: Path, files: int = 2) -> Path:
    """Save a sharded checkpoint with an index, tied names once."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    seen: dict[int, str] = {}
    state = {k: v for k, v in model.state_dict().items() if seen.setdefault(v.data_ptr(), k) == k}
    where = {name: f"part-{number % files}.safetensors" for number, name in enumerate(state)}
    for file in set(where.values()):
        part = {name: state[name].contiguous() for name in state if where[name] == file}
        save_file(part, folder / file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def size_of(folder: Path) -> int:
    """Return the bytes of tensors in the files of a folder."""
    total = 0
    for file in folder.glob("*.safetensors"):
        total += file.stat().st_size - 8 - int.from_bytes(file.open("rb").read(8), "little")
    return total


def make(stage: int, scheme: str = "split", **rest: Any) -> Engine:
    mode, precision = MASTERS[scheme]
    with empty():
        model = GPT(layers=1, moe=True, seed=rest.pop("seed", 0))
    written = config(stage, mode, precision=precision, **rest.pop("config", {}))
    return initialize(model, config=written, device="cpu", quiet=True, **rest)


def wrong(engine: Engine, want: nn.Module) -> list[str]:
    """Return the names whose master, storage or buffer are not the bits of `want`."""
    found = []
    state = want.state_dict()
    with engine.gathered() as shown:
        for row in engine.plan.rows:
            values = state[row.name].float()
            if not torch.equal(engine.parameter(row.name).master, values):
                found.append(f"master {row.name}")
            split = row.columns.update is not None and row.columns.update.master is Master.SPLIT
            rounded = round_away(values) if split else values
            if not torch.equal(shown[row.name], rounded.to(shown[row.name].dtype)):
                found.append(f"shown {row.name}")
    for name, buffer in engine.module.named_buffers():
        if not torch.equal(buffer, state[name]):
            found.append(f"buffer {name}")
    return found


# --- bits and bytes -------------------------------------------------------------------------------------


def load(folder: Path, want: nn.Module, stage: int, scheme: str, replicate: int = 1) -> tuple[list[str], int]:
    """Load on this rank; return the wrong names, and the bytes that were read."""
    read, plain = 0, SafetensorsReader._bytes

    def count(reader: Any, stored: Any, first: int, into: torch.Tensor) -> None:
        nonlocal read
        read += into.numel() * into.element_size()
        plain(reader, stored, first, into)

    rest = {"sharding": {"replicate": replicate}} if replicate > 1 else {}
    with mock.patch.object(SafetensorsReader, "_bytes", count):
        engine = make(stage, scheme, weights=folder, config=rest)
    found = wrong(engine, want), read
    engine.destroy()
    return found


@pytest.mark.cells(1)
@pytest.mark.parametrize("scheme", MASTERS)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("world", "replicate"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_masters_have_the_bits_of_the_files_and_every_byte_is_read_once(
    tmp_path: Path, world: int, replicate: int, stage: int, scheme: str
) -> None:
    model = given()
    model.scale.fill_(0.125)
    folder = save(model, tmp_path)
    runs = run_ranks(load, world, folder, model, stage, scheme, replicate)
    assert [differs for differs, _ in runs] == [[]] * world
    size, per_rank = size_of(folder), [read for _, read in runs]
    # Every replica reads all of it but the buffers, which rank 0 reads for everybody.
    assert sum(per_rank) == size * replicate - 4 * (replicate - 1)
    assert max(per_rank) < 1.2 * size * replicate / world + 70_000


@pytest.mark.cells(1)
@pytest.mark.parametrize("scheme", MASTERS)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_files_are_exact_in_every_master(
    tmp_path: Path, dtype: torch.dtype, stage: int, scheme: str
) -> None:
    model = given(dtype)
    model.scale = model.scale.float()  # a buffer keeps its own dtype or narrower
    folder = save(model, tmp_path)
    assert [differs for differs, _ in run_ranks(load, 2, folder, model.float(), stage, scheme)] == [[], []]


@pytest.mark.parametrize("stages", [(1, 3), pytest.param(STAGES, marks=pytest.mark.slow)], ids=str)
@on_ranks(2, timeout=120)
def test_loading_later_gives_the_same_bits(stages: tuple[int, ...], tmp_path: Path) -> None:
    """Load into an engine that has trained a step: values change, moments do not, and it trains on."""
    if torch.distributed.get_rank() == 0:
        save(given(), tmp_path)
    torch.distributed.barrier()
    for scheme in MASTERS:
        losses = set()
        for stage in stages:
            engine = make(stage, scheme)
            engine.backward(engine(batch(0, engine.mesh.rank())))
            engine.step()
            moments = engine.parameter("layers.0.norm1.weight").state["exp_avg"]
            assert load_weights(engine, tmp_path, quiet=True).bytes == size_of(tmp_path), (stage, scheme)
            assert torch.equal(engine.parameter("layers.0.norm1.weight").state["exp_avg"], moments)
            assert wrong(engine, given()) == [], (stage, scheme)
            loss = engine(batch(1, engine.mesh.rank()))
            engine.backward(loss)
            engine.step()
            losses.add(loss.item())
            engine.destroy()
        assert len(losses) == 1, "all stages compute the same loss"


# --- first values ---------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A model with every way in which a parameter gets its initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 24, padding_idx=2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 40) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(24) * 1.0)
        self.big = nn.Parameter(torch.empty(300, 24))
        self.reset_parameters()
        self.head = nn.Linear(24, 300, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._again)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.big, std=0.02)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, gain=0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.big[tokens]
        for layer in self.layers:
            x = layer(x)
        return (self.head(x * self.scale)).square().mean()


def first_values() -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in STAGES:
        torch.manual_seed(100 + torch.distributed.get_rank())  # rank 0's seed is everybody's
        with empty():
            model = Bare()
        engine = initialize(model, config=config(stage, "bf16"), device="cpu", quiet=True)
        found.append(masters(engine))
        engine.destroy()
    return found


def test_first_values_are_the_same_bits_at_every_stage_and_world_size() -> None:
    first, *others = [
        values for world in (1, 4) for rank in run_ranks(first_values, world) for values in rank
    ]
    for other in others:
        assert [name for name in first if not torch.equal(first[name], other[name])] == []
    gram = first["layers.0.linear2.weight"] @ first["layers.0.linear2.weight"].T
    assert torch.allclose(gram, 0.25 * torch.eye(24), atol=1e-5)
    assert not torch.equal(first["layers.0.linear1.weight"], first["layers.1.linear1.weight"])
    assert 0.01 < first["big"].std() < 0.03 and torch.equal(first["scale"], torch.ones(24))
    assert torch.equal(first["layers.1.norm1.weight"], torch.ones(24))


def test_an_optimizer_over_parameters_without_memory_trains_as_over_others(tmp_path: Path) -> None:
    """Parameters stay the same objects, so groups that were made before the engine stay valid."""
    folder = save(given(), tmp_path)
    runs = []
    for without in (False, True):
        with empty() if without else contextlib.nullcontext():
            model = GPT(layers=1, moe=True)
        kept = list(model.parameters())
        groups = [{"params": kept[:5], "lr": 0.0}, {"params": kept[5:], "lr": 1e-2}]
        optimizer = torch.optim.AdamW(groups)
        engine = initialize(model, optimizer, config(3, "bf16"), weights=folder, device="cpu", quiet=True)
        assert [id(p) for p in model.parameters()] == [id(p) for p in kept]
        for step in range(2):
            engine.backward(engine(batch(step)))
            engine.step()
        runs.append(masters(engine))
    assert [name for name in runs[0] if not torch.equal(runs[0][name], runs[1][name])] == []
    names = [name for name, _ in model.named_parameters()]
    want = given().state_dict()
    for place, name in enumerate(names):
        assert torch.equal(runs[1][name], want[name]) == (place < 5), name


# --- errors on every rank -------------------------------------------------------------------------------


def refused(broken: Path, fails: bool) -> str:
    """Return the error of a rank when the files are broken for rank 1 alone."""
    alone = torch.distributed.get_rank() == 1
    plain = os.preadv

    def read(number: int, rooms: list[memoryview], place: int) -> int:
        if place > 20_000:
            raise OSError(5, "Input/output error")
        return plain(number, rooms, place)

    if alone and fails:
        os.preadv = read
    with pytest.raises(ModelError) as error:
        make(3, weights=broken if alone else broken.parent / "sound")
    return str(error.value)


BROKEN: dict[str, tuple[Callable[[bytes], bytes | None], str]] = {
    "short": (lambda data: data[:-64], "It was cut short"),
    "header": (lambda data: data[:8] + b"x" + data[9:], "must be JSON"),
    "absent": (lambda data: None, "must exist, as `model.safetensors.index.json` names it"),
    "vanishes": (lambda data: data, "must be readable in it"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_files_that_are_broken_for_one_rank_are_an_error_on_all(tmp_path: Path, kind: str) -> None:
    save(given(), tmp_path / "sound")
    file = save(given(), tmp_path / "broken") / "part-1.safetensors"
    harm, expected = BROKEN[kind]
    data = harm(file.read_bytes())
    file.unlink() if data is None else file.write_bytes(data)
    told = run_ranks(refused, 2, tmp_path / "broken", kind == "vanishes")
    assert all(expected in text for text in told), told


@on_ranks(2)
def test_a_model_with_memory_on_one_rank_only_is_an_error_on_all() -> None:
    with empty() if torch.distributed.get_rank() == 0 else contextlib.nullcontext():
        model = nn.Linear(300, 300)
    with pytest.raises(RankError, match="must be built alike on every rank"):
        initialize(model, config=config(3, "fp32"), device="cpu", quiet=True)
