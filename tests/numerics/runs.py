"""Training runs on the ranks of a test, for comparison between stages, modes and meshes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.numerics.networks import GPT, batch
from tests.ranks.harness import destroy_at_the_end
from zerodrift.api import initialize
from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.engine import Engine


@dataclass
class Run:
    """Results of a run, to compare bit for bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    masters: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def differs(self, other: Run) -> list[str]:
        """List the results that are not bit for bit the same."""
        numbers = ("losses", "norms", "scales")
        found = [name for name in numbers if getattr(self, name) != getattr(other, name)]
        for kind in ("weights", "masters"):
            found += [f"{kind} {name}" for name in diff(getattr(self, kind), getattr(other, kind))]
        for name, state in self.states.items():
            theirs = other.states[name]
            # Ranks that begin elsewhere in a segment may keep a moment of zeros that others do not.
            nothing = torch.zeros_like(self.masters[name])
            found += [
                f"state {name} {key}"
                for key in state.keys() | theirs.keys()
                if not torch.equal(state.get(key, nothing), theirs.get(key, nothing))
            ]
        return found


def require_alike(one: Any, other: Any) -> None:
    """Fail with the names of what differs between two runs, or two sets of values."""
    found = one.differs(other) if isinstance(one, Run) else diff(one, other)
    assert found == [], found


def config(stage: int, mode: str, micro_batches: int = 1, **rest: Any) -> dict[str, Any]:
    """Return a config with clipping and AdamW."""
    precision = {"mode": mode, **rest.pop("precision", {})}
    base = {
        "precision": precision,
        "zero_optimization": {"stage": stage},
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]}},
    }
    return {**base, **rest}


def make(written: dict[str, Any], model: torch.nn.Module | None = None, **rest: Any) -> Engine:
    """Make an engine on the CPU, by default of a small GPT."""
    model = model if model is not None else GPT()
    return destroy_at_the_end(initialize(model, config=written, device="cpu", quiet=True, **rest))


def train(
    engine: Engine,
    steps: int,
    micro_batches: int = 1,
    data: Callable[[int, int, int], torch.Tensor] = batch,
) -> Run:
    """Train some steps and return all results."""
    run = Run()
    rank = engine.mesh.rank("data")
    for step in range(steps):
        for micro in range(micro_batches):
            loss = engine(data(step, rank, micro))
            engine.backward(loss)
            run.losses.append(loss.item())
            result = engine.step()
        run.norms.append(result.grad_norm)
        run.scales.append(result.loss_scale)
    return finish(engine, run)


def finish(engine: Engine, run: Run | None = None) -> Run:
    """Read weights, masters and moments, full."""
    run = Run() if run is None else run
    with engine.gathered() as values:
        run.weights = {name: value.detach().clone() for name, value in values.items()}
    run.masters, run.states = masters_and_states(engine)
    return run


def gradients(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the whole gradient of each parameter."""
    return {row.name: engine.parameter(row.name).gradient for row in engine.plan.rows}


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the whole master of each parameter."""
    return {row.name: engine.parameter(row.name).master for row in engine.plan.rows}


def diff(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of values that are not bit for bit the same."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(value, other[name])]


def masters_and_states(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, torch.Tensor]]]:
    """Return whole masters and moments of trained parameters by name, in fp32."""
    kinds = whole_values(engine)
    masters = kinds.pop("master")
    names = [row.name for row in engine.plan.rows if row.trained and row.name in masters]
    states = {n: {kind: values[n] for kind, values in kinds.items() if n in values} for n in names}
    return {name: masters[name] for name in names}, states


def whole_values(engine: Engine) -> dict[str, dict[str, torch.Tensor]]:
    """Return whole masters and moments in fp32: kind -> parameter -> value. All travel in one message,
    because a gather for each would take as long as the steps of a test."""
    with raise_on_all_ranks(engine.comm):
        held = list(_held(engine))
    found: dict[str, dict[str, torch.Tensor]] = {"master": {}}
    filled: dict[tuple[str, str], torch.Tensor] = {}
    for parts in engine.comm.all_gather_object(held):
        for kind, name, shape, start, part in parts:
            empty = torch.full(shape, torch.nan, device="cpu")
            whole = found.setdefault(kind, {}).setdefault(name, empty).view(-1)
            known = filled.setdefault((kind, name), torch.zeros_like(whole, dtype=torch.bool))
            span, here = slice(start, start + len(part)), torch.from_numpy(part)
            same = (whole[span] == here) | (whole[span].isnan() & here.isnan())
            assert (same | ~known[span]).all(), f"ranks hold different values of {kind} {name}"
            whole[span], known[span] = here, True
    return found


def _held(engine: Engine) -> Iterator[tuple[str, str, tuple[int, ...], int, Any]]:
    """Yield (`master` or a moment, parameter, whole shape, first element, values) of all values of this
    rank."""
    for piece in engine.executor.pieces():
        for kind, flat in {"master": piece.weights(), **piece.moments()}.items():
            for span in piece.held:
                values = flat[span.place].float().cpu().numpy()
                yield kind, span.row.name, span.row.whole_shape, span.start, values


def same(runs: Sequence[Run]) -> list[str]:
    """List the differences between the first run and the others."""
    return [f"run {number}: {what}" for number, run in enumerate(runs) for what in runs[0].differs(run)]
