"""One script runs on every executor: native, `fully_shard`, a pipeline, and one of a single stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerodrift as zd
from tests.numerics.networks import GPT, batch
from tests.numerics.runs import config
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS
from tests.ranks.harness import on_ranks, run_ranks
from zerodrift.engine.engine import Engine
from zerodrift.errors import ModelError, UnsupportedError, ZerodriftError

EXECUTORS = ("native 0", "native 3", "fsdp2 3", "pipeline", "one stage")
NAMES = ("layers.1.mlp.up.weight", "norm.bias", "embed.weight")
FROZEN = "layers.0.mlp.down.bias"


def engine_of(executor: str, mode: str, tied: bool = True, frozen: str = "") -> Engine:
    torch.set_num_threads(1)
    model = GPT(LAYERS, tied=tied)
    if frozen:
        model.get_parameter(frozen).requires_grad_(False)
    written = config(0 if executor in ("native 0", "pipeline") else 3, mode, COUNT)
    if executor.startswith("fsdp2"):
        written["backend"] = "fsdp2"
    stages = {"pipeline": 2, "one stage": 1}.get(executor)
    if stages:
        written["pipeline"] = {"stages": stages, "schedule": "1f1b", "micro_batches": COUNT}
    return zd.initialize(model, config=written, parts=PARTS, device="cpu", quiet=True)


def data(step: int) -> list[Tensor]:
    """Return the same data on every rank, so that the average over data ranks is that of one."""
    return [batch(step, 0, micro) for micro in range(COUNT)]


def train_script(executor: str) -> dict[str, Any]:
    engine = engine_of(executor, "fp32", tied=False)
    names = [row.name for row in engine.plan.rows]
    found: dict[str, Any] = {"class": type(engine).__name__}
    found["losses"] = engine.accumulate(data(0))
    assert engine.micro_batches == COUNT and engine.is_boundary
    found["gradients"] = {name: engine.parameter(name).gradient for name in names}
    assert engine.step().updated and engine.global_steps == 1 and engine.micro_batches == 0
    result = engine.train_batch(data(1), [1.0, 2.0, 0.5, 1.0])
    found["loss"], found["norm"] = result.loss, engine.grad_norm
    assert result.step.grad_norm == engine.grad_norm
    engine.accumulate(data(2))
    engine.zero_grad()
    found["evaluated"] = engine.eval().evaluate(data(3)[:3])
    found["masters"] = {name: engine.parameter(name).master for name in names}
    found["moments"] = {name: engine.parameter(name).state["exp_avg"] for name in names}
    engine.destroy()
    return found


def plain() -> dict[str, Any]:
    """Run the script as a loop of torch."""
    model, found = GPT(LAYERS, tied=False), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, betas=(0.9, 0.95))
    for step, weights in enumerate([(1.0,) * COUNT, (1.0, 2.0, 0.5, 1.0)]):
        optimizer.zero_grad()
        losses = [model(tokens) for tokens in data(step)]
        loss = sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / COUNT
        loss.backward()
        if step == 0:
            found["losses"] = tuple(loss.item() for loss in losses)
            found["gradients"] = {name: p.grad.clone() for name, p in model.named_parameters()}
        found["loss"] = loss.item()
        found["norm"] = float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
    with torch.no_grad():
        found["evaluated"] = sum(model(tokens).item() for tokens in data(3)[:3]) / 3
    found["masters"] = {name: p.detach() for name, p in model.named_parameters()}
    found["moments"] = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    return found


def test_one_script_trains_on_every_executor_as_a_plain_loop_does() -> None:
    expected = plain()
    of_all = {executor: run_ranks(train_script, 2, executor) for executor in EXECUTORS}
    for executor, ranks in of_all.items():
        for found in ranks:
            assert found.pop("class") == "Engine"
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=f"{executor}: {{}}".format)
    for executor in ("native 3", "pipeline", "one stage"):
        torch.testing.assert_close(of_all[executor][1], of_all["native 0"][0], rtol=0, atol=0, msg=executor)


@on_ranks(2)
def test_what_is_wrong_with_micro_batches_is_one_error_on_every_rank() -> None:
    engine, batches = engine_of("native 3", "bf16"), data(0)
    odd = engine.mesh.rank() == 1
    weights = [1.0, float("nan"), 1.0, 1.0]
    refused: dict[str, Callable[[], Any]] = {
        "`micro_batches`: must be 4, .*got 3": lambda: engine.train_batch(batches[:3] if odd else batches),
        "`weights`: must be 4 finite.*nan": lambda: engine.train_batch(batches, weights if odd else ()),
        "`micro_batches`: must be at least one": lambda: engine.evaluate([]),
    }
    for told, act in refused.items():
        with pytest.raises(ModelError, match=f"(?s)^{told}"):
            act()
    engine.backward(engine(batches[0]))
    with pytest.raises(UnsupportedError, match=r"^`accumulate`: must be given all micro-batches of a step"):
        engine.train_batch(batches)
    engine.zero_grad()
    assert len(engine.train_batch(batches).losses) == COUNT
    engine.destroy()


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(2)
def test_what_is_assigned_to_a_parameter_is_what_is_read(executor: str) -> None:
    engine = engine_of(executor, "bf16")
    for parameter in map(engine.parameter, NAMES):
        wanted = torch.linspace(-1, 1, parameter.master.numel()).view(parameter.shape)
        parameter.master = wanted
        assert torch.equal(parameter.master, wanted)
        assert torch.equal(parameter.value, wanted.bfloat16())
        shown = parameter.value
        for values in (shown, wanted):
            values.view(-1)[0] = 3.0
        parameter.value = shown
        assert torch.equal(parameter.value, shown)
        assert torch.equal(parameter.master, wanted), "what was not changed keeps every bit"
        assert not parameter.gradient.any() and not parameter.state
    engine.accumulate(data(0))
    for parameter in map(engine.parameter, NAMES):
        gradient = parameter.gradient
        parameter.gradient = 2 * gradient
        assert gradient.any()
        torch.testing.assert_close(parameter.gradient, 2 * gradient, rtol=1e-6, atol=0)
    assert engine.step().updated
    for parameter in map(engine.parameter, NAMES):
        state, before = parameter.state, parameter.state["exp_avg_sq"]
        assert set(state) == {"exp_avg", "exp_avg_sq"}
        ones = torch.ones(parameter.shape)
        state["exp_avg"] = ones
        assert torch.equal(parameter.state["exp_avg"], ones) and torch.equal(state["exp_avg"], ones)
        assert torch.equal(parameter.state["exp_avg_sq"], before)
    # What only rank 0 writes is everybody's, at both ends of a pipeline too.
    with engine.gathered(["embed.weight"], write=True) as shown:
        for value in shown.values() if engine.mesh.rank() == 0 else ():
            with torch.no_grad():
                value.fill_(0.25)
    assert (engine.parameter("head.weight").value == 0.25).all()
    with engine.gathered(["head.weight"]) as shown:
        assert all((value == 0.25).all() for value in shown.values())
    engine.train_batch(data(1))
    engine.destroy()


@pytest.mark.parametrize("executor", ["native 3", "fsdp2 3", "pipeline"])
@on_ranks(2)
def test_what_cannot_be_written_is_one_error_on_every_rank(executor: str) -> None:
    engine = engine_of(executor, "bf16", frozen=FROZEN)
    parameter, frozen = engine.parameter(NAMES[0]), engine.parameter(FROZEN)
    whole = parameter.master
    odd = engine.mesh.rank() == 1
    exactly = "or a floating dtype that it holds exactly; got"

    def assign(what: str, value: Any) -> Callable[[], Any]:
        return lambda: setattr(parameter, what, value)

    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: engine.parameter("layers.1.mlp.up.wieght"), "Did you mean `layers.1.mlp.up.weight` or"),
        (lambda: engine.gathered(["nothing"]), "`nothing`: must be a parameter of the model"),
        (lambda: frozen.gradient, f"`{FROZEN}`: must be trained"),
        (lambda: frozen.state, f"`{FROZEN}`: must be trained"),
        (assign("master", whole[:1] if odd else whole), "must have the shape of the whole parameter"),
        (assign("master", whole.long()), f"must be float32 {exactly} int64"),
        (assign("master", whole.double()), "got float64. Write `value.to(torch.float32)`"),
        (assign("value", whole if odd else whole.bfloat16()), f"must be bfloat16 {exactly} float32"),
        (assign("master", 1.0), "must be a tensor; got float"),
        (assign("gradient", whole), "must have a gradient to replace; got none in this step"),
        (lambda: parameter.set_moment("exp_avg", whole), "must have optimizer state 'exp_avg'; got none yet"),
    ]
    for act, told in refused:
        with pytest.raises(ZerodriftError, match=re.escape(told)):
            act()
    assert torch.equal(parameter.master, whole), "nothing was written"
    frozen.master = torch.ones(frozen.shape)
    assert torch.equal(frozen.master, torch.ones(frozen.shape))
    engine.train_batch(data(0))  # and goes on
    with pytest.raises(ZerodriftError, match="must have optimizer state 'momentum'; got exp_avg, exp_avg_sq"):
        parameter.set_moment("momentum", whole)
    engine.destroy()
