"""What a checkpoint of an engine holds: its items, its head, and a rank's own state; and their way back.

Reading out of the engine and filling it are local to a rank; who has agreed to what is `checkpoint`'s affair.

Invariant: filling an engine with what was read out of another leaves equal masters, moments and counters,
whatever the stage, the number of ranks and the master scheme of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from zerodrift.dtypes import DType
from zerodrift.engine.digest import Digest
from zerodrift.engine.shards import Part, SegmentShard, Shards
from zerodrift.errors import CheckpointError
from zerodrift.io.checkpoint import state as states
from zerodrift.io.checkpoint.differences import Running
from zerodrift.io.checkpoint.digests import recorded
from zerodrift.io.checkpoint.items import CheckpointReader, Destination, Item, moment_key, weight_key
from zerodrift.io.checkpoint.manifest import Manifest, SavedParameter
from zerodrift.io.checkpoint.packing import packed
from zerodrift.io.checkpoint.writing import Head
from zerodrift.optim.schedules import SCHEDULES
from zerodrift.versions import __version__

if TYPE_CHECKING:
    from zerodrift.engine.engine import Engine
    from zerodrift.optim.updater import Counters
    from zerodrift.plan.table import Row


@dataclass(frozen=True, slots=True)
class StageSummary:
    """What a rank of a pipeline tells rank 0 for the head."""

    counters: Counters
    moments: dict[str, tuple[str, ...]]
    """The moments that its parameters have."""
    buffers: dict[str, torch.Tensor]
    """Those that rank 0 has not."""


VERSIONS = (("zerodrift", __version__), ("torch", torch.__version__))


# --- out --------------------------------------------------------------------------------------------------


def items(engine: Engine, frozen: bool = True) -> Iterator[Item]:
    """This rank's share of weights and moments, one segment at a time; of `frozen` parameters too."""
    shards = Shards(engine)
    saved = {row.name for row in _saved(engine, frozen)}
    for part in shards.weights():
        if part.name in saved:
            yield _item(weight_key(part.name), part)
    for key, part in shards.moments():
        yield _item(moment_key(key, part.name), part)


def copied(engine: Engine, frozen: bool = True) -> list[Item]:
    """The same in host memory of its own, to be written while the engine goes on."""
    return [
        Item(item.key, item.numel, item.start, item.values.to("cpu", copy=True))
        for item in items(engine, frozen)
    ]


def _saved(engine: Engine, frozen: bool) -> list[Row]:
    return [row for row in engine.plan.rows if frozen or row.trained]


def _item(key: str, part: Part) -> Item:
    return Item(key, part.numel, part.start, part.values)


def summary(engine: Engine, counters: Counters, known: Collection[str]) -> StageSummary:
    """By this rank; `counters` are of its whole stage, and `known` are the buffers that rank 0 has."""
    if engine.plan.policy.pipeline is None or engine.mesh.rank("data"):
        return StageSummary(counters, {}, {})
    updater, rows = engine.updater, [row for row in engine.part.rows if row.trained]
    moments = {} if updater is None else {row.name: updater.moment_names(row.name, counters) for row in rows}
    buffers = states.buffers(engine.module)
    return StageSummary(
        counters, moments, {name: buffer.cpu() for name, buffer in buffers if name not in known}
    )


def entries(
    engine: Engine,
    counters: Counters,
    frozen: bool = True,
    elsewhere: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[SavedParameter, ...]:
    """The table of parameters; of `frozen` ones too. `elsewhere` has the moments of those on other stages."""
    updater, group_of = engine.updater, engine.group_of
    table = []
    for row in _saved(engine, frozen):
        trained = updater is not None and row.trained
        dtype = DType.FP32 if trained else row.columns.storage.dtype
        group = group_of.get(row.name, -1) if trained else -1
        moments = updater.moment_names(row.name, counters) if updater is not None and trained else ()
        moments = elsewhere.get(row.name, moments)
        table.append(SavedParameter(row.names, row.whole_shape, dtype.value, group, moments))
    return tuple(table)


def head(
    engine: Engine,
    run: str,
    tag: str,
    stages: Sequence[StageSummary],
    digest: Digest,
    *,
    alike: bool,
    frozen: bool,
) -> Head:
    """What rank 0 adds, of what all stages told; with `frozen` parameters or without. `alike` is whether all
    clients gave the same."""
    counters = merged([stage.counters for stage in stages])
    moments = {name: names for stage in stages for name, names in stage.moments.items()}
    rows = _saved(engine, frozen)
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
        parameters=len(rows),
        elements=sum(row.whole_numel for row in rows),
        files=(),
        digests=recorded(engine, digest),
    )
    shared = {**states.shared(engine, counters), "alike": alike}
    for stage in stages:
        shared["buffers"] = {**stage.buffers, **shared["buffers"]}
    return Head(
        manifest,
        entries(engine, counters, frozen, moments),
        plan.to_json(),
        packed(shared, "optimizer, schedule and buffers"),
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
        engine.group_of,
        states.groups(engine),
        schedule_name(engine),
        VERSIONS,
    )


def merged(ranks: Sequence[Counters]) -> Counters:
    """The counters of all ranks; those that own parts of one parameter count alike."""
    counters_of_all: Counters = {}
    for counters in ranks:
        counters_of_all.update(counters)
    return counters_of_all


# --- in ---------------------------------------------------------------------------------------------------


def check_moments(engine: Engine, table: Sequence[SavedParameter], counters: Counters) -> None:
    """That this run's optimizer has every moment that it would be given."""
    updater = engine.updater
    by_name = {name: entry for entry in table for name in entry.names}
    if updater is None:
        return
    for name, of in counters.items():
        # What holds for all are numbers; a parameter's moments stand by the names of their dtypes.
        kinds = [getattr(torch, value, None) for value in of.values() if isinstance(value, str)]
        if any(not name or not isinstance(kind, torch.dtype) for kind in kinds):
            raise CheckpointError("counters", "must be numbers and names of dtypes", got=repr(dict(of)))
    for piece in Shards(engine).pieces():
        for span in piece.held if piece.updated else ():
            entry = by_name.get(span.row.name)
            known = () if entry is None else updater.moment_names(span.row.name, counters)
            odd = () if entry is None else [key for key in entry.moments if key not in known]
            if odd:
                raise CheckpointError(
                    span.row.name,
                    f"must have been saved with the moments {', '.join(known) or 'none'}",
                    got=f"{', '.join(odd)} too",
                    do="`allow=('optimizer',)` begins with new moments.",
                )


def check_held(engine: Engine, reader: CheckpointReader, table: Sequence[SavedParameter]) -> None:
    """That all is there that this rank would read."""
    by_name = {name: entry for entry in table for name in entry.names}
    for piece in Shards(engine).pieces():
        for span in piece.held:
            if span.row.name in by_name:
                reader.check(by_name[span.row.name], span.start, span.start + span.numel)


def fill(
    engine: Engine, reader: CheckpointReader, table: Sequence[SavedParameter], counters: Counters | None
) -> None:
    """Weights, and with `counters` the optimizer's state, into what this rank owns. `Shards.sync_storage` is
    still to be called. What is not in the table keeps its values, and its moments begin at zero."""
    by_name = {name: entry for entry in table for name in entry.names}
    if counters is not None and engine.updater is not None:
        engine.updater.set_counters(counters)
    for piece in Shards(engine).pieces():
        values = piece.zeros()
        there = [span for span in piece.held if span.row.name in by_name]
        if len(there) < len(piece.held):
            values.copy_(piece.weights())
        wanted = [
            Destination(weight_key(by_name[span.row.name].name), span.start, values[span.place])
            for span in there
        ]
        reader.read(wanted)
        piece.set_weights(values)
        del values, wanted
        if piece.updated and counters is not None:
            _fill_moments(piece, reader, by_name)


def _fill_moments(
    piece: SegmentShard, reader: CheckpointReader, by_name: Mapping[str, SavedParameter]
) -> None:
    there = [span for span in piece.held if span.row.name in by_name]
    keys = dict.fromkeys(key for span in there for key in by_name[span.row.name].moments)
    for key in keys:
        values = piece.zeros()
        reader.read(
            [
                Destination(moment_key(key, entry.name), span.start, values[span.place])
                for span in there
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
    return packed(states.rank_state(engine, client, different), "client")
