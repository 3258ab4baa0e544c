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
from tests.numerics.runs import config, make
from tests.ranks.harness import on_ranks, run_ranks
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


def run(
    tensor: bool, stage: int, mode: str, micro: int, rest: dict[str, Any]
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Return losses of this rank's data, norms, masters."""
    model = network()
    if tensor:
        model = divided(model, torch.distributed.get_world_size())
    engine = make({**config(stage, mode, micro), "backend": "fsdp2", **rest}, model)
    losses, norms = [], []
    for step in range(2):
        for number in range(micro):
            loss = engine(batch(step, engine.mesh.rank("data"), number))
            engine.backward(loss)
            losses.append(loss.item())
            result = engine.step()
        norms.append(result.grad_norm)
    return losses, norms, {row.name: engine.parameter(row.name).master for row in engine.plan.rows}


CLIPPED = {"optimizer": SGD, "gradient_clipping": 0.1}
PLAIN = {"optimizer": SGD}
SLOW = [
    *((2, 3, "fp32", 1, PLAIN), (2, 2, "fp32", 2, CLIPPED), (2, 3, "fp32", 1, {})),
    *((4, 0, "fp32", 2, PLAIN), (4, 1, "fp32", 2, PLAIN), (4, 2, "fp32", 2, CLIPPED)),
    *((4, 3, "fp32", 1, CLIPPED), (4, 3, "fp32", 1, {})),
]
CASES = [
    *((2, 0, "fp32", 2, PLAIN), (4, 3, "bf16", 2, PLAIN)),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("ranks", "stage", "mode", "micro", "rest"), CASES, ids=str)
def test_it_trains_as_the_plain_model_does(
    ranks: int, stage: int, mode: str, micro: int, rest: dict[str, Any]
) -> None:
    plain = run_ranks(run, ranks // 2, False, stage, mode, micro, rest)
    found = run_ranks(run, ranks, True, stage, mode, micro, rest)
    # A matrix product of halves is rounded in another order: a few ulps of fp32 per product, of bf16 in bf16.
    near = 2e-5 if mode == "fp32" else 2e-2
    for rank, (losses, norms, masters) in enumerate(found):
        wanted_losses, wanted_norms, wanted = plain[rank // 2]
        assert losses == pytest.approx(wanted_losses, rel=near)
        assert norms == pytest.approx(wanted_norms, rel=near)
        assert masters.keys() == wanted.keys()
        for name, master in masters.items():
            assert master.shape == wanted[name].shape
            if rest.get("optimizer") is SGD:  # Adam's first steps are the sign of what may be rounding
                torch.testing.assert_close(master, wanted[name], rtol=near, atol=near * 0.5, msg=name)
    for one, other in zip(found[::2], found[1::2], strict=True):
        assert one[0] == other[0] and one[1] == other[1]
        assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])


# --- values, the precision line, an exception -----------------------------------------------------------


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks()
def test_values_and_what_is_observed(world: int) -> None:
    plain = dict(network().named_parameters())
    engine: Any = make(config(3, "bf16", 2, backend="fsdp2"), divided(network(), world))
    name, row = "layers.0.mlp.up.weight", "layers.0.mlp.down.weight"
    assert isinstance(engine.executor.members[name].sharded, DTensor)
    assert [type(p) for p in engine.executor.members[row].sharded.placements] == [Shard, Shard]
    for each, given in plain.items():
        assert torch.equal(engine.parameter(each).master, given.detach()), each
    with engine.gathered(write=True) as shown:
        assert shown[row].shape == plain[row].shape
        engine.module.layers[0].mlp.up.weight.data.fill_(1.0 + engine.mesh.rank())  # rank 0's is everybody's
        shown[row][3, 40] = 7.0
    assert torch.equal(engine.parameter(name).master, torch.ones(2 * WIDTH, WIDTH))
    assert engine.parameter(row).master[3, 40] == 7.0
    changed = torch.linspace(-1, 1, plain[row].numel()).view(plain[row].shape)
    engine.parameter(row).master = changed
    assert torch.equal(engine.parameter(row).master, changed)

    engine.backward(engine(batch(0, engine.mesh.rank("data"))))
    gradient = engine.parameter(row).gradient
    assert gradient.shape == plain[row].shape and gradient.abs().sum() > 0
    engine.parameter(row).gradient = 2 * gradient
    assert torch.equal(engine.parameter(row).gradient, 2 * gradient)
    engine.backward(engine(batch(1, engine.mesh.rank("data"))))
    assert engine.step().updated
    moments = dict(engine.parameter(row).state)
    engine.parameter(row).state["exp_avg"] = moments["exp_avg"] + 1
    assert torch.equal(engine.parameter(row).state["exp_avg"], moments["exp_avg"] + 1)

    with observe(engine) as seen:
        for micro in range(2):
            engine.backward(engine(batch(2, engine.mesh.rank("data"), micro)))
            engine.step()
    seen = merged(engine.comm.all_gather_object(seen))
    compare.require_declared(engine.plan, seen)
    cells = {column: seen.seen(row, column) for column in compare.COLUMNS}
    assert cells["compute"] == {"bfloat16"} and cells["accumulate"] == {"float32"} == cells["state"]
    assert [column for column, found in cells.items() if not found] == (
        [] if world > 2 else ["gather", "reduce"]
    )

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


# --- what is refused ------------------------------------------------------------------------------------


def divided_otherwise(what: str) -> str:
    """Make an engine of a model that is divided in a way that cannot be run, and return its error."""
    ranks, model = torch.distributed.get_world_size(), network()
    if what in ("native", "nothing", "files"):
        divided(model, ranks)
    else:
        sizes = {"layout": (2, ranks // 2), "alone": (1, ranks)}.get(what, (ranks // 2, 2))
        names = ("tp", "dp") if what == "layout" else ("dp", "tp")
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)["tp"]
        styles = {"head": ColwiseParallel(output_layouts=Replicate())} if what == "uneven" else STYLES
        parallelize_module(model if what == "uneven" else model.layers[0].mlp, mesh, styles)
    try:
        backend = "native" if what in ("native", "alone") else "fsdp2"
        make(config(3, "fp32", backend=backend), model, **({"weights": "nowhere"} if what == "files" else {}))
    except (ConfigError, MeshError, ModelError) as error:
        return str(error)
    return ""


TOLD = {
    "native": "`backend`: must be fsdp2 for a model whose parameters are DTensors",
    "layout": "must be a DTensor over ranks [0, 1] here; got one over [0, 2]",
    "uneven": "`head.weight`: must be divided evenly over 2 ranks; got 61 along dimension 0",
    "files": "`weights`: must be read where parameters are plain tensors; got DTensors",
    "nothing": "",
}


@on_ranks(4)
def test_what_cannot_be_run_is_refused_by_name() -> None:
    for what, told in TOLD.items():
        found = divided_otherwise(what)
        assert bool(told) == bool(found), (what, found)
        assert told in found or torch.distributed.get_rank(), (what, found)


def test_dtensors_of_one_rank_are_refused_on_the_native_backend_too() -> None:
    (found,) = run_ranks(divided_otherwise, 1, "alone")
    assert "`layers.0.mlp.up.weight`: must be a plain tensor on the native backend; got a DTensor" in found
