"""A user's own tensor parallelism on backend fsdp2 has the same losses, norms and weights as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.numerics.networks import GPT, WIDTH, batch
from tests.numerics.runs import config, diff, make, masters
from tests.ranks.harness import on_ranks, run_ranks
from tests.unit.refusals import error_of
from zerodrift.errors import ConfigError, MeshError, ModelError, UnsupportedError
from zerodrift.inspect.check import compare
from zerodrift.inspect.trace.engine import observe
from zerodrift.inspect.trace.records import merged

SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}


class Part(nn.Module):
    """A norm whose weight is whole on every rank while its gradient is partial, and two divided matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mesh: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is not None:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def network() -> GPT:
    model = GPT(layers=2, tied=False)
    torch.manual_seed(1)
    model.layers[1].mlp = Part()
    return model


STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def divided(model: GPT, ranks: int) -> GPT:
    """Divide both feed-forwards over two neighbours; everything else stays plain."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    parallelize_module(model.layers[0].mlp, mesh, STYLES)
    parallelize_module(model.layers[1].mlp, mesh, {"norm": SequenceParallel(), **STYLES})
    model.layers[1].mlp.mesh = mesh
    return model


def run(tensor: bool, stage: int, mode: str) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses of this rank's data, norms, masters."""
    model = network()
    if tensor:
        model = divided(model, torch.distributed.get_world_size())
    written = config(stage, mode, 2, backend="fsdp2", optimizer=SGD, gradient_clipping=0.1)
    engine = make(written, model)
    losses, norms = [], []
    for step in range(2):
        for number in range(2):
            loss = engine(batch(step, engine.mesh.rank("data"), number))
            engine.backward(loss)
            losses.append(loss.item())
            result = engine.step()
        norms.append(result.grad_norm)
    return losses, norms, masters(engine)


@pytest.mark.parametrize(
    ("ranks", "stage", "mode"),
    [(2, 0, "fp32"), (4, 3, "bf16"), pytest.param(4, 2, "fp32", marks=pytest.mark.slow)],
)
def test_it_trains_as_the_plain_model_does(ranks: int, stage: int, mode: str) -> None:
    plain = run_ranks(run, ranks // 2, False, stage, mode)
    found = run_ranks(run, ranks, True, stage, mode)
    # A matrix product of halves is rounded in another order: a few ulps of fp32 per product, of bf16 in bf16.
    near = 2e-5 if mode == "fp32" else 2e-2
    for rank, (losses, norms, values) in enumerate(found):
        wanted_losses, wanted_norms, wanted = plain[rank // 2]
        assert losses == pytest.approx(wanted_losses, rel=near)
        assert norms == pytest.approx(wanted_norms, rel=near)
        torch.testing.assert_close(values, wanted, rtol=near, atol=near * 0.5)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one[:2] == other[:2] and diff(one[2], other[2]) == []


@on_ranks(2)
def test_values_and_what_is_observed() -> None:
    plain = dict(network().named_parameters())
    engine: Any = make(config(3, "bf16", 2, backend="fsdp2"), divided(network(), 2))
    name, row = "layers.0.mlp.up.weight", "layers.0.mlp.down.weight"
    assert [type(p) for p in engine.executor.members[row].sharded.placements] == [Shard, Shard]
    for each, given in plain.items():
        assert torch.equal(engine.parameter(each).master, given.detach()), each
    with engine.gathered(write=True) as shown:
        engine.module.layers[0].mlp.up.weight.data.fill_(1.0 + engine.mesh.rank())  # rank 0's is everybody's
        shown[row][3, 40] = 7.0
    assert torch.equal(engine.parameter(name).master, torch.ones(2 * WIDTH, WIDTH))
    parameter = engine.parameter(row)
    assert parameter.master[3, 40] == 7.0
    changed = torch.linspace(-1, 1, plain[row].numel()).view(plain[row].shape)
    parameter.master = changed
    assert torch.equal(parameter.master, changed)
    engine.backward(engine(batch(0, engine.mesh.rank("data"))))
    gradient = parameter.gradient
    assert gradient.shape == plain[row].shape and gradient.abs().sum() > 0
    parameter.gradient = 2 * gradient
    assert torch.equal(parameter.gradient, 2 * gradient)
    engine.backward(engine(batch(1, engine.mesh.rank("data"))))
    assert engine.step().updated
    moment = parameter.state["exp_avg"]
    parameter.state["exp_avg"] = moment + 1
    assert torch.equal(parameter.state["exp_avg"], moment + 1)

    with observe(engine) as seen:
        for micro in range(2):
            engine.backward(engine(batch(2, engine.mesh.rank("data"), micro)))
            engine.step()
    seen = merged(engine.comm.all_gather_object(seen))
    compare.require_declared(engine.plan, seen)
    found = {column: seen.seen(row, column) for column in compare.COLUMNS if seen.seen(row, column)}
    assert found.keys() == {*compare.COLUMNS} - {"gather", "reduce"}
    assert found["compute"] == {"bfloat16"} and found["accumulate"] == {"float32"} == found["state"]
    with pytest.raises(UnsupportedError, match="`checkpoint`: must be written"):
        engine.pieces()


@on_ranks(2)
def test_what_is_not_finite_on_one_rank_is_so_on_all() -> None:
    """A gradient that is not finite on one rank of the axis only skips the step on both."""
    engine: Any = make(config(3, "fp32", 1, backend="fsdp2"), divided(network(), 2))
    before = engine.parameter("layers.0.mlp.up.weight").master
    engine.backward(engine(batch(0)))
    if engine.mesh.rank("tensor") == 1:
        engine.executor.members["layers.0.mlp.up.weight"].gradient()[5] = float("inf")
    result = engine.step()
    assert result.skipped and result.bad == ("layers.0.mlp.up.weight",)
    assert torch.equal(engine.parameter("layers.0.mlp.up.weight").master, before)


def divided_otherwise(what: str) -> None:
    """Make an engine of a model that is divided in a way that cannot be run."""
    ranks, model = torch.distributed.get_world_size(), network()
    if what in ("native", "files"):
        divided(model, ranks)
    else:
        sizes, names = (
            ((2, ranks // 2), ("tp", "dp")) if what == "layout" else ((ranks // 2, 2), ("dp", "tp"))
        )
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)["tp"]
        styles = {"head": ColwiseParallel(output_layouts=Replicate())} if what == "uneven" else STYLES
        parallelize_module(model if what == "uneven" else model.layers[0].mlp, mesh, styles)
    rest = {"weights": "nowhere"} if what == "files" else {}
    make(config(3, "fp32", backend="native" if what == "native" else "fsdp2"), model, **rest)


TOLD = {
    "native": "`backend`: must be fsdp2 for a model whose parameters are DTensors",
    "layout": "must be a DTensor over ranks [0, 1] here; got one over [0, 2]",
    "uneven": "`head.weight`: must be divided evenly over 2 ranks; got 61 along dimension 0",
    "files": "`weights`: must be read where parameters are plain tensors; got DTensors",
}


@on_ranks(4)
def test_what_cannot_be_run_is_refused_by_name() -> None:
    for what, told in TOLD.items():
        found = error_of((ConfigError, MeshError, ModelError), divided_otherwise, what)
        assert told in found or torch.distributed.get_rank(), (what, found)
