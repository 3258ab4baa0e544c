"""Read a checkpoint's contents out of an engine, and fill an engine from them, without collective calls.

Invariant: a filled engine has equal masters, moments and counters, whatever its stage, ranks and master
scheme.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch

from zerodrift.checkpoint import state as states
from zerodrift.checkpoint.differences import CurrentRun
from zerodrift.checkpoint.manifest import Manifest, SavedParameter
from zerodrift.checkpoint.save import Head
from zerodrift.checkpoint.tensors import CheckpointReader, Item, feedback_key, moment_key, weight_key
from zerodrift.dtypes import DType
from zerodrift.engine import MOMENTS, Digest, Engine, Span
from zerodrift.errors import CheckpointError
from zerodrift.kernels import PackedRun, narrow
from zerodrift.model import non_persistent_buffers
from zerodrift.optim import SCHEDULES, Counters, learning_rates
from zerodrift.versions import __version__

VERSIONS = (("zerodrift", __version__), ("torch", torch.__version__))
WINDOW = 1 << 20
Table = Mapping[str, SavedParameter]
"""The saved parameters by all of their names."""
FORM = "form"
"""Key of the checksum beside the value digests that says in which dtypes values rest."""


@dataclass(frozen=True, slots=True)
class StageSummary:
    """The part of the manifest that a rank of a pipeline stage knows."""

    counters: Counters
    moments: dict[str, tuple[str, ...]]
    buffers: dict[str, torch.Tensor]
    hidden: frozenset[str]
    """Buffers that are not in a state dict."""


def items(engine: Engine, frozen: bool = True) -> Iterator[Item]:
    """Yield this rank's share of weights, moments and what narrow wires rounded away, by segment."""
    saved = {row.name for row in engine.plan.rows if frozen or row.trained}
    rank = engine.mesh.rank("data")
    for piece in engine.pieces():
        share = [span for span in piece.share if span.row.name in saved]
        if piece.packed is not None:
            yield from (_records(piece.packed, span) for span in share)
        elif share:
            yield from _items(weight_key, share, piece.weights())
        for key, flat in piece.moments().items() if piece.updated and piece.share else ():
            yield from _items(partial(moment_key, key), piece.share, flat)
        if piece.feedback is not None:
            for row in piece.rows:
                values = piece.feedback[row.offset : row.offset + row.numel]
                yield Item(feedback_key(rank, row.name), row.numel, 0, values)


def _items(key: Callable[[str], str], spans: Iterable[Span], flat: torch.Tensor) -> Iterator[Item]:
    for span in spans:
        yield Item(key(span.row.name), span.row.whole_numel, span.start, flat[span.place])


def _records(packed: PackedRun, span: Span) -> Item:
    """Return blocks of a narrow format as bytes, so that they are loaded with every bit."""
    records, form = packed.records(span.place.start, span.numel), narrow.form_of(packed.dtype)
    numel = form.blocks(span.row.whole_shape) * form.record_bytes
    start = span.start // packed.block * form.record_bytes
    return Item(weight_key(span.row.name), numel, start, records)


def summary(engine: Engine, counters: Counters, known: Collection[str]) -> StageSummary:
    """Summarize this rank's pipeline stage; `known` are the buffers that rank 0 has."""
    if engine.mesh.rank("data"):  # the first rank of a stage summarizes it
        return StageSummary(counters, {}, {}, frozenset())
    updater, rows = engine.updater, [row for row in engine.part.rows if row.trained]
    moments = {} if updater is None else {row.name: updater.moment_names(row.name, counters) for row in rows}
    buffers = {name: buffer.cpu() for name, buffer in engine.module.named_buffers() if name not in known}
    return StageSummary(counters, moments, buffers, frozenset(non_persistent_buffers(engine.module)))


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
    """Collect what rank 0 writes for all ranks; `alike` is True if all gave the same client state."""
    counters = merged([stage.counters for stage in stages])
    plan, updater = engine.plan, engine.updater
    rows = [row for row in plan.rows if frozen or row.trained]
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
        lr=learning_rates(updater),
        ranks=plan.mesh.world,
        parameters=len(rows),
        elements=sum(row.whole_numel for row in rows),
        digests=((FORM, _form(engine)), *digest.by_kind().items()),
    )
    shared = {**states.shared(engine, counters), "alike": alike}
    if any(piece.feedback is not None for piece in engine.pieces()):
        shared["feedback"] = engine.mesh.size("data")
    moments: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        moments |= stage.moments
        shared["buffers"] = {**stage.buffers, **shared["buffers"]}
        shared["hidden"] = sorted(stage.hidden.union(shared["hidden"]))
    table = []
    for row in rows:
        dtype, group = row.columns.storage.dtype, -1
        if updater is not None and row.trained:
            dtype, group = DType.FP32, engine.group_of.get(row.name, -1)
        names, shape = row.names, row.whole_shape
        table.append(SavedParameter(names, shape, dtype.value, group, moments.get(row.name, ())))
    packed = states.packed(shared, "optimizer, schedule and buffers")
    return Head(manifest, tuple(table), plan.to_json(), packed)


def schedule_name(engine: Engine) -> str:
    """Return the type of the config's schedule, or the class of the caller's."""
    if isinstance(engine.schedule, tuple(SCHEDULES.values())) and engine.plan.policy.schedule is not None:
        return engine.plan.policy.schedule.type
    return "" if engine.schedule is None else type(engine.schedule).__name__


def running(engine: Engine) -> CurrentRun:
    """Describe the engine as far as a checkpoint is compared with it."""
    kind = "" if engine.updater is None else engine.updater.kind
    groups, schedule = states.groups(engine), schedule_name(engine)
    return CurrentRun(engine.plan, kind, engine.group_of, groups, schedule, VERSIONS)


def merged(ranks: Sequence[Counters]) -> Counters:
    """Merge the counters of all ranks; owners of parts of one parameter count alike."""
    return {name: counts for counters in ranks for name, counts in counters.items()}


def check_counters(counters: Counters) -> None:
    """Raise unless the counters are numbers or, for the dtypes of moments, names of dtypes."""
    for name, values in counters.items():
        # Counters of all parameters are numbers; those of one parameter may name the dtypes of its moments.
        kinds = [getattr(torch, value, None) for value in values.values() if isinstance(value, str)]
        if any(not name or not isinstance(kind, torch.dtype) for kind in kinds):
            must = "must be numbers and names of dtypes"
            raise CheckpointError("counters", must, got=repr(dict(values)))


def check_held(engine: Engine, reader: CheckpointReader, table: Table, counters: Counters | None) -> None:
    """Raise unless the files hold everything that this rank would read. With `counters`, also raise unless
    this run's optimizer has every saved moment."""
    updater = None if counters is None else engine.updater
    for piece in engine.pieces():
        for span in (span for span in piece.held if span.row.name in table):
            entry = table[span.row.name]
            reader.check(entry, span.start, span.start + span.numel)
            if updater is None or not piece.updated:
                continue
            known = updater.moment_names(span.row.name, counters or {})
            if odd := [key for key in entry.moments if key not in known]:
                must = f"must have been saved with the moments {', '.join(known) or 'none'}"
                do = "`allow=('optimizer',)` begins with new moments."
                raise CheckpointError(span.row.name, must, got=f"{', '.join(odd)} too", do=do)


def fill(engine: Engine, reader: CheckpointReader, table: Table, counters: Counters | None) -> None:
    """Fill the weights that this rank owns, and with `counters` the optimizer's state. Call
    `Engine.sync_storage` afterwards. A parameter that is not in the table keeps its values, and its moments
    become zero."""
    if counters is not None and engine.updater is not None:
        engine.updater.set_counters(counters)
    for piece in engine.pieces():
        there = [(span, table[span.row.name]) for span in piece.held if span.row.name in table]
        if piece.packed is not None:
            for span, entry in there:
                _fill_packed(piece.packed, reader, span, entry)
            continue
        values = piece.zeros()
        if len(there) < len(piece.held):
            values.copy_(piece.weights())
        reader.read_weights([(entry, span.start, values[span.place]) for span, entry in there])
        piece.set_weights(values)
        del values
        if not piece.updated or counters is None:
            continue
        for moment in dict.fromkeys(moment for _, entry in there for moment in entry.moments):
            values = piece.zeros()
            spans = [(moment_key(moment, e.name), span) for span, e in there if moment in e.moments]
            reader.read((key, span.start, values[span.place]) for key, span in spans)
            piece.set_moment(moment, values)
            del values


def fill_feedback(engine: Engine, reader: CheckpointReader, ranks: int) -> None:
    """Restore the rounding errors of narrow wires, which `ranks` data ranks saved. Without saved errors, this
    run's are dropped, as they belong to other weights. Each rank gets its own errors; on another number of
    ranks the first gets the sum of all, since all are added to the same sum of gradients."""
    rank, world = engine.mesh.rank("data"), engine.mesh.size("data")
    saved = [rank] if ranks == world else range(0 if rank else ranks)
    for piece in engine.pieces():
        piece.set_feedback(None)
        update = piece.rows[0].columns.update
        if update is None or not update.reduce.feedback or not ranks:
            continue
        size = max(row.offset + row.numel for row in piece.rows)
        whole = torch.zeros(size, device=engine.mesh.device)
        for number in saved:
            for row in piece.rows:
                values = torch.empty(row.numel)
                reader.read([(feedback_key(number, row.name), 0, values)])
                whole[row.offset : row.offset + row.numel] += values.to(whole.device)
        piece.set_feedback(whole)


def _fill_packed(packed: PackedRun, reader: CheckpointReader, span: Span, entry: SavedParameter) -> None:
    """Copy saved blocks of the same format bit by bit; decode and encode those of any other format."""
    for first in range(0, span.numel, WINDOW):
        count, start = min(WINDOW, span.numel - first), span.start + first
        if entry.dtype == packed.dtype.value:
            packed.copy(span.place.start + first, reader.read_packed(entry, start, count))
        else:
            values = torch.empty(count)
            reader.read_weights([(entry, start, values)])
            packed.encode(span.place.start + first, values.to(packed.data.device))


def require_saved(
    engine: Engine, saved: dict[str, str], digest: Digest, path: Path, *, moments: bool
) -> None:
    """Raise if the values in memory are not those that were saved: checksums of files prove the bytes, and
    digests prove their places. Values that are now stored in other dtypes are not compared."""
    if saved.get(FORM) != _form(engine):
        return
    here = digest.by_kind()
    different = [kind for kind in here if here[kind] != saved.get(kind) and (moments or kind != MOMENTS)]
    if different:
        got = f"other {' and '.join(different)}, by their digest"
        do = "Load it again, or an older checkpoint. If this error repeats, test this machine's memory."
        raise CheckpointError(path, "must have the saved bits after loading", got=got, do=do)


def _form(engine: Engine) -> str:
    text = [str(engine.updater is not None)]
    for row in engine.plan.rows:
        update = row.columns.update
        kept = "" if update is None else f"{update.master} {update.state}"
        travels = f" {row.columns.gather}" if row.columns.rounds_on_the_way else ""
        text.append(f"{row.name} {row.columns.storage.dtype} {kept}{travels}")
    return hashlib.sha256("\n".join(text).encode(errors="surrogatepass")).hexdigest()[:16]
