"""What a checkpoint of an engine holds: its items, its head, and a rank's own state; and their way back.

Reading out of the engine and filling it are local to a rank; who has agreed to what is `checkpoint`'s affair.

Invariant: filling an engine with what was read out of another leaves equal masters, moments and counters,
whatever the stage, the number of ranks and the master scheme of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import torch

from zerodrift import __version__
from zerodrift.dtypes import DType
from zerodrift.engine.shards import Held, Part, Shards
from zerodrift.io import checkpoint_state as states
from zerodrift.io.checkpoint_differences import Running
from zerodrift.io.checkpoint_items import Item, Reader, Wanted, moment_key, weight_key
from zerodrift.io.checkpoint_manifest import Entry, Manifest
from zerodrift.io.checkpoint_writing import Head
from zerodrift.optim.schedules import SCHEDULES

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine
    from zerodrift.optim.update import Counters

VERSIONS = (("zerodrift", __version__), ("torch", torch.__version__))


# --- out --------------------------------------------------------------------------------------------------


def items(engine: Engine) -> Iterator[Item]:
    """This rank's share of weights and moments, one segment at a time."""
    shards = Shards(engine)
    for part in shards.weights():
        yield _item(weight_key(part.name), part)
    for key, part in shards.moments():
        yield _item(moment_key(key, part.name), part)


def copied(engine: Engine) -> list[Item]:
    """The same in host memory of its own, to be written while the engine goes on."""
    return [
        Item(item.key, item.numel, item.start, item.values.to("cpu", copy=True)) for item in items(engine)
    ]


def _item(key: str, part: Part) -> Item:
    return Item(key, part.numel, part.start, part.values)


def entries(engine: Engine, counters: Counters) -> tuple[Entry, ...]:
    """The table of parameters."""
    updater = engine.updater
    found = []
    for row in engine.plan.rows:
        trained = updater is not None and row.columns.update is not None
        dtype = DType.FP32 if trained else row.columns.storage.dtype
        group = updater.group_of.get(row.name, -1) if updater is not None and trained else -1
        moments = updater.moment_names(row.name, counters) if updater is not None and trained else ()
        found.append(Entry(row.names, row.shape, dtype.value, group, moments))
    return tuple(found)


def head(engine: Engine, run: str, tag: str, counters: Counters, alike: bool) -> Head:
    """What rank 0 adds. `alike` says that the client's state is the same on every rank."""
    plan, updater = engine.plan, engine.updater
    manifest = Manifest(
        run=run,
        tag=tag,
        step=engine.global_steps,
        skipped=engine.skipped_steps,
        saved=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=VERSIONS,
        source=plan.source,
        mode=plan.policy.mode.value,
        stage=plan.policy.sharding.stage,
        mesh=plan.mesh,
        digest=plan.digest,
        optimizer="" if updater is None else updater.kind,
        schedule=schedule_name(engine),
        loss_scale=engine.scaler.scale,
        lr=() if updater is None else updater.learning_rates(),
        ranks=plan.mesh.world,
        parameters=len(plan.rows),
        elements=sum(row.numel for row in plan.rows),
        files=(),
    )
    shared = {**states.shared(engine, counters), "alike": alike}
    return Head(
        manifest,
        entries(engine, counters),
        plan.to_json(),
        states.packed(shared, "optimizer, schedule and buffers"),
    )


def schedule_name(engine: Engine) -> str:
    """Of the config's schedule, or of the class of the caller's."""
    if isinstance(engine.schedule, tuple(SCHEDULES.values())) and engine.plan.policy.schedule is not None:
        return engine.plan.policy.schedule.type
    return "" if engine.schedule is None else type(engine.schedule).__name__


def running(engine: Engine) -> Running:
    """The engine as far as a checkpoint is compared with it."""
    updater = engine.updater
    return Running(
        engine.plan,
        "" if updater is None else updater.kind,
        {} if updater is None else updater.group_of,
        states.groups(engine),
        schedule_name(engine),
        VERSIONS,
    )


def merged(ranks: Sequence[Counters]) -> Counters:
    """The counters of all ranks; those that own parts of one parameter count alike."""
    found: Counters = {}
    for counters in ranks:
        found.update(counters)
    return found


# --- in ---------------------------------------------------------------------------------------------------


def fill(engine: Engine, reader: Reader, table: Sequence[Entry], counters: Counters | None) -> None:
    """Weights, and with `counters` the optimizer's state, into what this rank owns. `Shards.spread` is still
    to be called."""
    by_name = {name: entry for entry in table for name in entry.names}
    if counters is not None and engine.updater is not None:
        engine.updater.set_counters(counters)
    for piece in Shards(engine).pieces():
        values = piece.zeros()
        wanted = [
            Wanted(weight_key(by_name[span.row.name].name), span.start, values[span.place])
            for span in piece.held
        ]
        reader.read(wanted)
        piece.set_weights(values)
        del values, wanted
        if piece.updated and counters is not None:
            _fill_moments(piece, reader, by_name)


def _fill_moments(piece: Held, reader: Reader, by_name: Mapping[str, Entry]) -> None:
    keys = dict.fromkeys(key for span in piece.held for key in by_name[span.row.name].moments)
    for key in keys:
        values = piece.zeros()
        reader.read(
            [
                Wanted(moment_key(key, entry.name), span.start, values[span.place])
                for span in piece.held
                if key in (entry := by_name[span.row.name]).moments
            ]
        )
        piece.set_moment(key, values)


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def persistent(model: torch.nn.Module) -> set[str]:
    """Buffers that a state dict of the model holds."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    }


def own_state(engine: Engine, client: Any, different: frozenset[str]) -> bytes:
    """This rank's own state, packed."""
    return states.packed(states.own(engine, client, different), "client")
