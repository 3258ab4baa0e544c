"""Pipelines on ranks: the order of the schedule, the plan's collectives, one loss scale, ties, edge cases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.numerics.experts import error
from tests.numerics.networks import GPT
from tests.numerics.runs import config, gradients
from tests.numerics.test_pipelines import COUNT, LAYERS, PARTS, data, pipeline
from tests.ranks.harness import on_ranks, run_ranks
from tests.ranks.test_pipeline_edges import STACK
from zerodrift.api import initialize
from zerodrift.errors import ZerodriftError
from zerodrift.pipeline.schedules import timeline
from zerodrift.plan.schedule import Collective, collectives, pipeline_events, step_end
from zerodrift.plan.stages import part


@pytest.mark.second
@on_ranks(2)
def test_the_order_that_a_plan_shows_is_the_order_that_runs() -> None:
    for schedule in ("gpipe", "1f1b", "interleaved", "interleaved-zero-bubble", "zbv", "dualpipev"):
        engine = pipeline(config(0, "fp32", COUNT), schedule, None, GPT(LAYERS))
        engine.train_batch(data(0, 0))
        planned = timeline(engine.plan)
        assert planned is not None
        assert tuple(engine.executor.actions) == planned.ranks[engine.mesh.rank("pipeline")], schedule


@pytest.mark.parametrize(
    ("stage", "keep", "schedule"), [(0, "step", "zbv"), (3, "step", "1f1b"), (3, "micro-batch", "zbv")]
)
@on_ranks(4)
def test_what_is_sent_is_what_the_plan_lists(stage: int, keep: str, schedule: str) -> None:
    """The order is the schedule's, too."""
    written = config(stage, "fp32", COUNT, sharding={"keep_gathered": keep} if stage == 3 else {})
    engine = pipeline(written, schedule, None, GPT(LAYERS))
    engine.train_batch(data(0, engine.mesh.rank("data")))  # torch learns the shapes
    with engine.comm.record() as log:
        engine.train_batch(data(1, engine.mesh.rank("data")))
    engine.destroy()
    rank, order = engine.mesh.rank("pipeline"), timeline(engine.plan)
    assert order is not None
    played = [event for _, found in pipeline_events(engine.plan, rank, order.ranks[rank]) for event in found]
    played += step_end(part(engine.plan, rank))
    moved = (entry for entry in log if entry.op != "broadcast")  # of the losses
    ordered = (event for event in played if isinstance(event, Collective))
    sent, listed, shown = (
        [(c.op, c.dtype, c.numel, c.axis, c.sum) for c in calls]
        for calls in (moved, collectives(engine.plan, rank), ordered)
    )
    assert Counter(sent) == Counter(listed), (sent, listed)
    assert sent == shown, (sent, shown)


@on_ranks(4)
def test_weight_gradients_are_right_where_parameters_are_resharded_in_between() -> None:
    """Parameters are gathered for each forward and backward, and freed where weight gradients are formed.
    torch drops 12 of 28 of them over `fully_shard`, without a word."""
    written = config(3, "fp32", COUNT, sharding={"keep_gathered": "micro-batch"})
    engine, plain = pipeline(written, "zbv", "queue", GPT(LAYERS, tied=False)), GPT(LAYERS, tied=False)
    engine.accumulate(data(0, engine.mesh.rank("data")))
    assert not any(segment.is_full for segment in engine.executor.segments if segment.gathers)
    for tokens in (*data(0, 0), *data(0, 1)):
        (plain(tokens) / (2 * COUNT)).backward()
    errors = {name: error(value, plain.get_parameter(name).grad) for name, value in gradients(engine).items()}
    assert all(each < 2e-6 for each in errors.values()), errors


class Counting(nn.Module):
    """A block with a buffer that every forward changes, as running statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.relu(self.inner(x))


@on_ranks(2)
def test_learning_shapes_changes_no_buffer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Counting(), nn.Dropout(0.0), Counting())
    engine = pipeline(config(0, "fp32", 2), "1f1b", None, model, STACK, micro_batches=2)
    for samples in (2, 2, 2, 3):  # other shapes are learnt anew
        engine.train_batch([torch.randn(samples, 8), torch.randn(samples, 8)])
    assert [float(value) for _, value in engine.executor.forwards[0].module.named_buffers()] == [8.0]


@on_ranks(4)
def test_an_overflow_on_one_stage_skips_the_step_on_all_with_one_scale() -> None:
    """One gradient of the last stage overflows fp16 in the second step."""
    written = config(1, "fp16", COUNT, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1})
    engine = pipeline(written, "1f1b", None, GPT(LAYERS, tied=False))
    for step, (scale, skipped) in enumerate([(256, False), (256, True), (128, False)]):
        engine.accumulate(data(step, engine.mesh.rank("data")))
        if step == 1 and engine.mesh.rank() == 3:
            engine.executor.forwards[-1].module.norm.weight.grad.fill_(float("inf"))
        result = engine.step()
        assert (result.loss_scale, result.skipped) == (scale, skipped), result
        assert result.bad == (("norm.weight",) if skipped else ()), result
        norms = {str(norm) for norm in engine.comm.all_gather_object(result.grad_norm)}
        assert len(norms) == 1, norms


def tied(mode: str, stage: int, stages: int) -> tuple[list[float], float, torch.Tensor, list[Any]]:
    """Train in a pipeline of so many stages, or without one for a single stage. Return losses of two steps,
    the first norm, the first gradient of the embedding, and copies of tied parameters."""
    written, model = config(stage, mode, COUNT), GPT(LAYERS)
    if stages > 1:
        engine = pipeline(written, "1f1b", None, model, stages=stages)
    else:
        engine = initialize(model, config=written, parts=PARTS, device="cpu", quiet=True)
    losses: list[float] = []
    norms, grads = [], []
    embedding = engine.parameter("embed.weight")

    def read_and_write() -> None:
        """Read a gradient after the norm, which leaves it as it was, and write it at both ends."""
        summed = embedding.gradient
        assert torch.equal(summed, grads[-1]), "another gradient after the norm"
        embedding.gradient = summed

    engine.before_update = read_and_write
    for step in range(2):
        losses += engine.accumulate(data(step, engine.mesh.rank("data")))
        grads.append(embedding.gradient)
        norms.append(engine.step().grad_norm)
    copies = [s for s in engine.executor.segments if s.spec.copies]
    held = [(s.spec.lead, s.rows[0].names, s.storage.clone()) for s in copies]
    return losses, norms[0], grads[0], held


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "stage", "stages", "data_ranks"), [("bf16", 3, 2, 2), ("fp32", 0, 4, 1)], ids=["sliced", "afar"]
)
def test_a_tied_embedding_is_summed_once_counted_once_and_kept_equal(
    mode: str, stage: int, stages: int, data_ranks: int
) -> None:
    """Stages without a part of the embedding may lie in between."""
    expected = run_ranks(tied, data_ranks, mode, stage, 1)
    seen = run_ranks(tied, 4, mode, stage, stages)
    first, last = ([held for _, _, _, (held,) in part] for part in (seen[:data_ranks], seen[-data_ranks:]))
    for (leads, names, values), (follows, others, copy) in zip(first, last, strict=True):
        assert leads and not follows and names == ("embed.weight",) and others == ("head.weight",)
        assert torch.equal(values, copy)
    for rank, (losses, norm, gradient, _) in enumerate(seen):
        plain_losses, plain_norm, plain, _ = expected[rank % data_ranks]
        # Head and embedding are added in another order.
        assert (gradient - plain).norm() < 1e-6 * plain.norm()
        assert norm == seen[0][1] == pytest.approx(plain_norm, rel=1e-6)
        assert losses[:COUNT] == plain_losses[:COUNT]
        assert losses == pytest.approx(plain_losses, rel=1e-6 if mode == "fp32" else 1e-2)


@on_ranks(2)
def test_what_cannot_run_is_said_on_every_rank_and_costs_nothing() -> None:
    engine = pipeline(config(0, "fp32", COUNT), "1f1b", None, GPT(LAYERS))
    tokens = data(0, 0)
    short = [each[:, :5] for each in tokens]
    gradient = torch.zeros((), requires_grad=True)
    refused: dict[str, Callable[[], Any]] = {
        "`micro_batches`: must be 4, as `gradient_acc": lambda: engine.train_batch(tokens[:3]),
        "`micro_batches`: must have the same shapes": lambda: engine.train_batch([*tokens[:3], short[3]]),
        r"`engine\(\.\.\.\)`: must not be called on a pipeline": lambda: engine(tokens[0]),
        "`backward`: must not be called on a pipeline": lambda: engine.backward(gradient),
        "`accumulate`: must be given all": lambda: [engine.accumulate(tokens) for _ in range(2)],
    }
    for told, act in refused.items():
        with pytest.raises(ZerodriftError, match=f"^{told}"):
            act()
        engine.zero_grad()
        engine.train_batch(tokens)  # and goes on
