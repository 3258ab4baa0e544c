"""What a pipeline does on its ranks: the order of the schedule, the plan's collectives, one scale, ties,
traps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.networks import GPT
from tests.numerics.runs import config, make
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import run_ranks
from zerodrift.api import initialize
from zerodrift.errors import ZerodriftError
from zerodrift.pipeline.cut import Parts
from zerodrift.pipeline.deferred import WeightQueue
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.schedule import Collective, collectives, pipeline_events, step_end
from zerodrift.plan.stages import part

SCHEDULES = ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev")


# --- the order, and the collectives -----------------------------------------------------------------------


def orders() -> list[bool]:
    found = []
    for schedule in SCHEDULES:
        engine = pipeline(config(0, "fp32", COUNT), schedule, None, GPT(LAYERS))
        engine.train_batch(data(0, 0))
        planned = timeline(engine.plan)
        assert planned is not None
        found.append(tuple(engine.executor.actions) == planned.ranks[engine.mesh.rank("pipeline")])
        engine.destroy()
    return found


def test_the_order_that_a_plan_shows_is_the_order_that_runs() -> None:
    for found in run_ranks(orders, 2):
        assert found == [True] * len(SCHEDULES)


def issued(stage: int, keep: str, schedule: str) -> list[list[Any]]:
    """What is sent, what the plan lists, and what it lists in the order of the schedule."""
    written = config(stage, "fp32", COUNT, sharding={"keep_gathered": keep} if stage == 3 else {})
    engine = pipeline(written, schedule, None, GPT(LAYERS))
    engine.train_batch(data(0, engine.mesh.rank("data")))  # torch learns the shapes
    with engine.comm.record() as log:
        engine.train_batch(data(1, engine.mesh.rank("data")))
    engine.destroy()
    moved = [entry for entry in log if entry.op != "broadcast"]  # of the losses
    rank, order = engine.mesh.rank("pipeline"), timeline(engine.plan)
    assert order is not None
    played = [event for _, found in pipeline_events(engine.plan, rank, order.ranks[rank]) for event in found]
    played += step_end(part(engine.plan, rank))
    sent = [call for call in played if isinstance(call, Collective)]
    words = (moved, collectives(engine.plan, rank), sent)
    return [[(c.op, c.dtype, c.numel, c.axis, c.sum) for c in each] for each in words]


@pytest.mark.parametrize(
    ("stage", "keep", "schedule"), [(0, "step", "zbv"), (3, "step", "1f1b"), (3, "micro-batch", "zbv")]
)
def test_what_is_sent_is_what_the_plan_lists(stage: int, keep: str, schedule: str) -> None:
    for sent, planned, played in run_ranks(issued, 4, stage, keep, schedule):
        assert Counter(sent) == Counter(planned)
        assert sent == played


# --- what goes wrong in torch over FSDP2 -------------------------------------------------------------------


def resharded() -> dict[str, Any]:
    """Parameters are gathered for each forward and backward, and gone where weight gradients are formed."""
    written = config(3, "fp32", COUNT, sharding={"keep_gathered": "micro-batch"})
    engine = pipeline(written, "zbv", "queue", GPT(LAYERS, tied=False))
    engine.accumulate(data(0, engine.mesh.rank("data")))
    full = any(segment.is_full for segment in engine.executor.segments if segment.gathers)
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    engine.destroy()
    return {"full": full, "gradients": found}


def exact(ranks: int, micro_batches: int) -> dict[str, torch.Tensor]:
    """fp64, plain torch."""
    model = GPT(LAYERS, tied=False).double()
    for rank in range(ranks):
        for tokens in data(0, rank)[:micro_batches]:
            hidden = model.embed(tokens)
            for layer in model.layers:
                hidden = layer(hidden)
            (PARTS.after(model, hidden, tokens) / (ranks * micro_batches)).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def worst(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative error by norm; NaN is the worst there is."""
    assert seen.keys() == expected.keys()
    found = [(seen[name].double() - value).norm() / value.norm() for name, value in expected.items()]
    return float(torch.stack(found).nan_to_num(nan=float("inf")).max())


def test_weight_gradients_are_right_where_parameters_are_resharded_in_between() -> None:
    """torch drops 12 of 28 of them over `fully_shard`, without a word."""
    expected = exact(2, COUNT)
    for found in run_ranks(resharded, 4):
        assert not found["full"]
        assert worst(found["gradients"], expected) < 1e-6


def one_micro_batch(weights: str) -> tuple[list[torch.dtype], dict[str, torch.Tensor]]:
    engine = pipeline(config(2, "bf16", 1), "zbv", weights, GPT(LAYERS, tied=False), micro_batches=1)
    engine.accumulate(data(0, engine.mesh.rank("data"))[:1])
    sums = [segment.reduced.dtype for segment in engine.executor.segments if segment.reduced is not None]
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    engine.destroy()
    return sums, found


def plain_bf16() -> dict[str, torch.Tensor]:
    engine = make(config(2, "bf16", 1), GPT(LAYERS, tied=False))
    engine.backward(engine(data(0, engine.mesh.rank("data"))[0]))
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    engine.destroy()
    return found


@pytest.mark.long
@pytest.mark.parametrize("weights", ["queue", "autograd"])
def test_one_micro_batch_has_one_gradient_dtype(weights: str) -> None:
    """torch raises over `fully_shard`: fp32 and bf16 gradients meet in one reduce-scatter."""
    expected = run_ranks(plain_bf16, 2)[0]
    for sums, found in run_ranks(one_micro_batch, 4, weights):
        assert set(sums) == {torch.float32}
        assert worst(found, {name: value.double() for name, value in expected.items()}) < 3e-3


def learnt() -> tuple[dict[str, torch.Tensor], int]:
    put: list[int] = []
    put_before = WeightQueue.put

    def counted(queue: WeightQueue, *args: Any, **kwargs: Any) -> None:
        put.append(1)
        put_before(queue, *args, **kwargs)

    WeightQueue.put = counted  # type: ignore[method-assign]
    engine = pipeline(config(0, "fp32", COUNT), "interleaved-zero-bubble", "queue", GPT(LAYERS, tied=False))
    engine.accumulate(data(0, 0))
    first = len(put)
    found = {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}
    engine.zero_grad()
    engine.accumulate(data(0, 0))
    engine.destroy()
    return found, len(put) - 2 * first


def test_a_backward_that_only_learns_shapes_leaves_nothing_behind() -> None:
    """torch runs a real one before the first step; it asks for no weight's gradient, and none is put."""
    expected = exact(1, COUNT)
    for found, more in run_ranks(learnt, 2):
        assert worst(found, expected) < 1e-6 and more == 0


class Counting(nn.Module):
    """A block with a buffer that every forward changes, as running statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.inner(self.linear(x)))


STACK = Parts("", before=lambda model, x: x, after=lambda model, hidden, x: hidden.square().mean())


def calls() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), nn.Dropout(0.0), Counting())
    written = config(0, "fp32", 2, pipeline={"stages": 2, "micro_batches": 2})
    engine = initialize(model, config=written, parts=STACK, device="cpu", quiet=True)
    for _ in range(3):
        engine.train_batch([torch.randn(2, 8), torch.randn(2, 8)])
    engine.train_batch([torch.randn(3, 8), torch.randn(3, 8)])  # other shapes are learnt anew
    found = [float(value) for _, value in engine.executor.forwards[0].module.named_buffers()]
    engine.destroy()
    return found


def test_learning_shapes_changes_no_buffer() -> None:
    assert run_ranks(calls, 2) == [[8.0], [8.0]]


# --- one scale, one decision, one norm ---------------------------------------------------------------------


def overflowing(tied: bool) -> list[tuple[float, bool, float | None, tuple[str, ...]]]:
    """In the second step the gradient of one parameter of the last stage overflows fp16."""
    written = config(1, "fp16", COUNT, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    engine = pipeline(written, "1f1b", None, GPT(LAYERS, tied=tied))
    found = []
    for step in range(3):
        engine.accumulate(data(step, engine.mesh.rank("data")))
        if step == 1 and engine.mesh.rank() == 3:
            last = engine.executor.forwards[-1].module.norm.weight
            last.grad.fill_(float("inf"))
        result = engine.step()
        found.append((result.loss_scale, result.skipped, result.grad_norm, result.bad))
    engine.destroy()
    return found


def test_an_overflow_on_one_stage_skips_the_step_on_all_with_one_scale() -> None:
    seen = run_ranks(overflowing, 4, False)
    for found in seen:
        assert [(scale, skipped) for scale, skipped, *_ in found] == [(256, False), (256, True), (128, False)]
        assert found[1][3] == ("norm.weight",)
        assert found == seen[0] or str(found) == str(seen[0])  # NaN is not itself


def tied() -> dict[str, Any]:
    engine = pipeline(config(3, "bf16", COUNT), "1f1b", None, GPT(LAYERS, tied=True))
    found: dict[str, Any] = {"norms": [], "losses": []}
    for step in range(3):
        losses = engine.accumulate(data(step, engine.mesh.rank("data")))
        if step == 0:
            found["gradient"] = engine.parameter("embed.weight").gradient
        found["norms"].append(engine.step().grad_norm)
        found["losses"] += losses
    segments = [s for s in engine.executor.segments if s.spec.copies]
    found["copy"] = [(s.spec.lead, s.rows[0].names, s.storage.clone()) for s in segments]
    engine.destroy()
    return found


def tied_alone() -> dict[str, Any]:
    engine = make(config(3, "bf16", COUNT), GPT(LAYERS, tied=True))
    found: dict[str, Any] = {"norms": [], "losses": []}
    for step in range(3):
        for number, tokens in enumerate(data(step, engine.mesh.rank("data"))):
            loss = engine(tokens)
            engine.backward(loss)
            if step == 0 and number == COUNT - 1:
                found["gradient"] = engine.parameter("embed.weight").gradient
            found["losses"].append(loss.item())
            result = engine.step()
        found["norms"].append(result.grad_norm)
    engine.destroy()
    return found


@pytest.mark.long
def test_a_tied_embedding_is_summed_once_counted_once_and_kept_equal() -> None:
    expected = run_ranks(tied_alone, 2)
    seen = run_ranks(tied, 4)
    first, last = [found["copy"][0] for found in seen[:2]], [found["copy"][0] for found in seen[2:]]
    assert [lead for lead, *_ in first] == [True] * 2 and [lead for lead, *_ in last] == [False] * 2
    assert first[0][1] == ("embed.weight",) and last[0][1] == ("head.weight",)
    for one, other in zip(first, last, strict=True):
        assert torch.equal(one[2], other[2])
    for rank, found in enumerate(seen):
        plain = expected[rank % 2]
        error = (found["gradient"] - plain["gradient"]).norm() / plain["gradient"].norm()
        assert error < 1e-6  # head and embedding are added in another order
        assert found["norms"][0] == pytest.approx(plain["norms"][0], rel=1e-6)
        assert found["losses"][:COUNT] == plain["losses"][:COUNT]
        assert found["norms"] == seen[0]["norms"]


# --- refusals ----------------------------------------------------------------------------------------------


def refused(case: str) -> str:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    tokens = data(0, 0)
    try:
        match case:
            case "too few":
                engine.train_batch(tokens[:3])
            case "shapes":
                engine.train_batch([*tokens[:3], tokens[3][:, :5]])
            case "stages apart" if engine.mesh.rank() == 1:
                engine.train_batch([each[:, :5] for each in tokens])
            case "call":
                engine(tokens[0])
            case "backward":
                engine.backward(torch.zeros((), requires_grad=True))
            case "twice":
                engine.accumulate(tokens)
                engine.accumulate(tokens)
            case _:
                engine.train_batch(tokens)
    except ZerodriftError as error:
        if case != "twice":
            engine.train_batch(tokens)  # and goes on
        return f"{type(error).__name__}: {error}"
    finally:
        engine.destroy()
    return ""


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("too few", "ModelError: `micro_batches`: must be 4, as `gradient_accumulation_steps` or "),
        ("shapes", "ModelError: `micro_batches`: must have the same shapes"),
        ("stages apart", "ModelError: `micro_batches`: must be the same on every stage of a pipeline"),
        ("call", "UnsupportedError: `engine(...)`: must not be called on a pipeline"),
        ("backward", "UnsupportedError: `backward`: must not be called on a pipeline"),
        ("twice", "UnsupportedError: `accumulate`: must be given all micro-batches of a step"),
        ("right", ""),
    ],
)
def test_what_cannot_run_is_said_on_every_rank_and_costs_nothing(case: str, told: str) -> None:
    for seen in run_ranks(refused, 2, case):
        assert seen.startswith(told) and bool(seen) == bool(told)


def four_stages() -> tuple[list[float], float | None, torch.Tensor]:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS), stages=4)
    losses = list(engine.accumulate(data(0, 0)))
    gradient = engine.parameter("embed.weight").gradient
    norm = engine.step().grad_norm
    losses += engine.train_batch(data(1, 0)).losses
    engine.destroy()
    return losses, norm, gradient


def four_alone() -> tuple[list[float], float | None, torch.Tensor]:
    engine = make(config(0, "fp32", COUNT), GPT(LAYERS))
    losses, norms, gradient = [], [], torch.zeros(())
    for step in range(2):
        for number, tokens in enumerate(data(step, 0)):
            loss = engine(tokens)
            engine.backward(loss)
            losses.append(loss.item())
            if step == 0 and number == COUNT - 1:
                gradient = engine.parameter("embed.weight").gradient
            norms.append(engine.step().grad_norm)
    engine.destroy()
    return losses, norms[COUNT - 1], gradient


def test_a_tie_reaches_over_the_stages_in_between() -> None:
    losses, norm, gradient = run_ranks(four_alone, 1)[0]
    for seen in run_ranks(four_stages, 4):
        assert seen[0][:COUNT] == losses[:COUNT]
        assert seen[0] == pytest.approx(losses, rel=1e-6)
        assert seen[1] == pytest.approx(norm, rel=1e-6)
        assert (seen[2] - gradient).norm() < 1e-6 * gradient.norm()
