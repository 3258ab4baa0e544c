"""Checkpoints of an engine: saved by name, resumed exactly, on any number of ranks and at any stage.

The weights are plain fp32 whatever the master scheme, the moments fp32 by torch's names, each parameter flat
and cut where the ranks' slices happen to end. What is in a checkpoint is `contents`'s affair, how
one appears in a folder, or does not, `writing`'s.

Invariant: a run that is killed at any moment and resumed from the newest checkpoint ends in the bits of one
that was not, on as many ranks and at the same stage.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import numpy as np

from zerodrift.comm.shared_errors import raise_on_all_ranks
from zerodrift.engine.digest import Digest
from zerodrift.engine.shards import Shards
from zerodrift.errors import CheckpointError, Problem, UnsupportedError, ZerodriftError, said
from zerodrift.io.checkpoint import contents
from zerodrift.io.checkpoint import state as states
from zerodrift.io.checkpoint.descriptions import Sums, damage_seen, other_files, state_file
from zerodrift.io.checkpoint.differences import (
    Allowed,
    CheckpointDifference,
    check_allowed,
    check_buffers,
    check_meaning,
    check_model,
    differences,
)
from zerodrift.io.checkpoint.digests import require_saved
from zerodrift.io.checkpoint.folder import LATEST, CheckpointFolder, automatic, check_tag
from zerodrift.io.checkpoint.items import CheckpointReader
from zerodrift.io.checkpoint.manifest import (
    SHARED,
    Manifest,
    SavedParameter,
    raise_damage,
    read_entries,
    read_manifest,
    read_plan,
)
from zerodrift.io.checkpoint.writing import Head, RankContents, Save, over_ranks, require_own
from zerodrift.io.deepspeed.files import is_deepspeed

if TYPE_CHECKING:
    from zerodrift.comm.collectives import Collectives
    from zerodrift.engine.engine import Engine
    from zerodrift.optim.updater import Counters

T = TypeVar("T")
Parts = Literal["all", "weights"]
Part = Literal["optimizer", "schedule", "counts"]
"""What comes with the weights: moments, groups, loss scale and random numbers; the schedule; the steps."""
ALL: frozenset[Part] = frozenset(get_args(Part))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    path: Path
    tag: str
    step: int
    """Optimizer steps taken when it was saved."""
    client: Any
    """What this rank gave to `save`. On another number of ranks what all of them gave, None where they
    differed."""
    differences: tuple[CheckpointDifference, ...]
    """What is not as it was when the checkpoint was saved; empty for an exact continuation."""

    def client_of(self, rank: int) -> Any:
        """The `client` that one of the saving ranks gave."""
        return states.read_state(self.path, state_file(rank))["client"]


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint that was read and judged, before anything is changed."""

    path: Path
    manifest: Manifest
    table: tuple[SavedParameter, ...]
    reader: CheckpointReader
    shared: dict[str, Any]
    own: dict[str, Any] | None
    """Of this rank; None on another number of ranks."""
    client: Any
    without: frozenset[Allowed]
    """What stays as the run has it."""
    differences: tuple[CheckpointDifference, ...]


class Checkpoints:
    """The checkpoints of one engine in one folder. Every rank makes one and calls it in the same way."""

    def __init__(
        self,
        engine: Engine,
        folder: str | os.PathLike[str],
        *,
        keep: int = 0,
        asynchronous: bool = False,
        quiet: bool = False,
        run: str = "",
        shared: bool = False,
    ) -> None:
        """`keep` is how many are kept of those whose tag is not chosen; 0 keeps all. `asynchronous` copies
        the state and writes it beside training. `quiet` says nothing on rank 0. `run` is of a run that also
        saves elsewhere; one is drawn without it. A folder that holds another run's checkpoints is refused,
        with the first step, unless one of them has been loaded by then. One that is `shared` is not, and a
        tag there may replace another run's, or DeepSpeed's own."""
        if type(keep) is not int or keep < 0:
            raise CheckpointError("keep", "must be a whole number of at least 0", got=repr(keep))
        self._engine = engine
        self._comm: Collectives = engine.comm
        self._folder = CheckpointFolder(folder, is_deepspeed) if shared else CheckpointFolder(folder)
        self._keep = keep
        self._asynchronous = asynchronous
        self._quiet = quiet
        lead = self._comm.mesh.rank() == 0
        found = (run or uuid.uuid4().hex, self._folder.runs_found() if lead and not shared else {})
        self.run, self._runs = self._comm.broadcast_object(found, 0)
        """Which run this is; that of a checkpoint that was loaded, from then on. And whose checkpoints were
        there before."""
        self._shared = shared
        self._pending: tuple[Save, Head | None] | None = None
        if self._runs and engine.progress.background is None:
            engine.progress.background = self
        self.digest: Digest | None = None
        """Of the state that was saved or loaded last; None where none was, or it was converted."""

    # --- save ---------------------------------------------------------------------------------------------

    def save(
        self,
        tag: str | None = None,
        client: Any = None,
        *,
        latest: bool = True,
        frozen: bool = True,
        within: bool = False,
    ) -> None:
        """Save the run between two steps, under `tag` or the step's number. `client` is anything that the
        caller wants back on this rank, such as its position in the data. `frozen=False` leaves frozen
        parameters out; such a checkpoint loads with `allow=("model",)`. `within=True` saves in the middle of
        a step too: gradients are in no checkpoint, so a run that goes on from there begins that step anew."""
        engine, comm = self._engine, self._comm
        if not within:
            self._require_between_steps("save")
        self.wait()
        named = automatic(engine.global_steps) if tag is None else tag
        check_tag(named)
        mine = (states.buffer_digests(engine.module), states.fingerprint(client))
        digests, first = comm.broadcast_object(mine, 0)
        apart = frozenset(name for name, digest in mine[0].items() if digests.get(name) != digest)

        def prepare() -> tuple[bytes, Counters]:
            counters = {} if engine.updater is None else engine.updater.counters()
            return contents.own_state(engine, client, apart), counters

        own, counters = everywhere(comm, prepare)
        counters = contents.merged(comm.all_gather_object(counters, "data"))
        stages = comm.gather_object(contents.summary(engine, counters, digests), "pipeline")
        alike = not over_ranks(comm, np.array([mine[1] != first], np.int64))[0]
        self.digest = digest = engine.digest()
        head = None

        def summarize() -> Head | None:
            if comm.mesh.rank():
                return None
            return contents.head(engine, self.run, named, stages, digest, alike=alike, frozen=frozen)

        head = everywhere(comm, summarize)
        under_way = Save(comm, self._folder, named, None if self._shared else self.run, latest)
        if self._asynchronous:
            self._pending = (under_way, head)
            engine.progress.background = self
            under_way.start(lambda: RankContents(contents.copied(engine, frozen), own))
        else:
            under_way.write(RankContents(contents.items(engine, frozen), own))
            self._say_saved(under_way.finish(head, self._keep))

    def wait(self) -> None:
        """Wait until a save that is under way is complete; raises on every rank if it failed."""
        if self._pending is not None:
            (save, head), self._pending = self._pending, None
            self._engine.progress.background = None
            self._say_saved(save.finish(head, self._keep))

    def check(self) -> None:
        """Called by the engine in every step while a save is under way, and in the first."""
        if self._pending is None:
            self._engine.progress.background = None
            require_own(self._folder, self._runs, self.run)
        elif self._pending[0].done():
            self.wait()

    finish = wait
    """Called by the engine before it is destroyed."""

    def abandon(self) -> None:
        """Called by the engine where an exception ends this rank."""
        if self._pending is not None:
            (save, _), self._pending = self._pending, None
            self._engine.progress.background = None
            save.abandon()

    def _say_saved(self, path: Path) -> None:
        self._say(f"saved {path}")

    def _say(self, text: str) -> None:
        if not self._quiet and self._comm.mesh.rank() == 0:
            print(f"zerodrift: {text}", flush=True)

    def _require_between_steps(self, what: str) -> None:
        if self._engine.micro_batches:
            raise UnsupportedError(
                what,
                "must be called between steps",
                got=f"{self._engine.micro_batches} micro-batches of a step that has not ended",
                do="Call it after a `step` that updated or skipped.",
            )

    # --- load ---------------------------------------------------------------------------------------------

    def resume(self, *, allow: Collection[Allowed] = ()) -> Loaded | None:
        """Load the newest checkpoint, or return None if none was ever saved here, as in a new run."""
        self._require_between_steps("resume")
        self.wait()
        path = self._on_one(self._folder.newest)
        return None if path is None else self._load(path, ALL, check_allowed(allow), True)

    def load(
        self,
        tag: str = LATEST,
        *,
        parts: Parts = "all",
        allow: Collection[Allowed] = (),
        verify: bool = True,
    ) -> Loaded:
        """Load a checkpoint. `parts="weights"` leaves the optimizer, its schedule, the counters and the
        random numbers alone. `allow` names the differences to accept. `verify` reads every file once more,
        each rank some of them, and compares checksums before anything is changed; without it, changed bits
        are loaded as they are."""
        return self.load_parts(tag, ALL if parts == "all" else frozenset(), allow, verify)

    def load_parts(
        self, tag: str, parts: frozenset[Part], allow: Collection[Allowed] = (), verify: bool = True
    ) -> Loaded:
        """The same, but for what comes with the weights."""
        self._require_between_steps("load")
        self.wait()
        path = self._on_one(lambda: self._folder.find(tag)) or Path()
        return self._load(path, parts, check_allowed(allow), verify)

    def _on_one(self, work: Callable[[], T]) -> T | None:
        """What one rank finds in the folder, for all: others may see it a moment later, and differ."""
        lead = self._comm.mesh.rank() == 0
        result = everywhere(self._comm, lambda: work() if lead else None)
        return self._comm.broadcast_object(result, 0)

    def _load(self, path: Path, parts: frozenset[Part], without: frozenset[Allowed], verify: bool) -> Loaded:
        engine, comm = self._engine, self._comm
        manifest = self._verified(path, verify)
        saved = everywhere(comm, lambda: self._judged(path, manifest, parts, without))
        before = everywhere(comm, lambda: states.StateBeforeLoad(engine))
        try:
            # What may still be refused comes before the first weight.
            everywhere(comm, lambda: self._put(saved, parts))
        except ZerodriftError:
            before.restore()
            raise
        counters = saved.shared["counters"] if _takes(saved, parts) else None
        try:
            everywhere(comm, lambda: contents.fill(engine, saved.reader, saved.table, counters))
        except CheckpointError as error:
            raise CheckpointError.of([*error.problems, _HALF_LOADED]) from error
        Shards(engine).sync_storage()
        if "optimizer" in parts and saved.own is not None:
            states.put_random_state(saved.own["random"], engine.mesh.device)
        self.run = manifest.run
        self._require_saved(saved, parts)
        loaded = Loaded(path, manifest.tag, manifest.step, saved.client, saved.differences)
        self._say(f"loaded {path}, step {manifest.step}")
        for difference in loaded.differences:
            self._say(f"  {difference}")
        return loaded

    def _require_saved(self, saved: _Found, parts: frozenset[Part]) -> None:
        """Values are those that were saved, where all of them were."""
        self.digest = None
        digests = dict(saved.manifest.digests)
        if digests and len(saved.table) == len(self._engine.plan.rows):
            self.digest = self._engine.digest()
            require_saved(self._engine, digests, self.digest, saved.path, moments=_takes(saved, parts))

    def _verified(self, path: Path, verify: bool) -> Manifest:
        """The manifest of what is as it was written; each rank looks at its share of the files."""
        comm = self._comm
        rank, ranks = comm.mesh.rank(), comm.mesh.size("world")

        def look() -> tuple[Manifest, Sums]:
            manifest = read_manifest(path)
            problems, sums = damage_seen(path, manifest, content=verify, rank=rank, ranks=ranks)
            raise_damage(problems)
            return manifest, sums

        manifest, sums = everywhere(comm, look)
        raise_damage(other_files(path, manifest, over_ranks(comm, sums)))
        return manifest

    def _judged(
        self, path: Path, manifest: Manifest, parts: frozenset[Part], without: frozenset[Allowed]
    ) -> _Found:
        """Everything but the tensors, compared with the run."""
        engine, now = self._engine, contents.running(self._engine)
        table, plan, reader = read_entries(path), read_plan(path), CheckpointReader(path)
        strict = "model" not in without
        apart = check_model(table, engine.plan, str(path), strict)
        if not strict:
            known = {name for row in engine.plan.rows for name in row.names}
            table = tuple(entry for entry in table if known & set(entry.names))
            without -= set() if apart else {"model"}
        contents.check_held(engine, reader, table)
        shared = states.read_state(path, SHARED)
        rank, ranks = self._comm.mesh.rank(), self._comm.mesh.size("world")
        own = states.read_state(path, state_file(rank)) if manifest.ranks == ranks else None
        problems: list[Problem] = []
        if "buffers" not in without:
            here = contents.shapes(dict(states.buffers(engine.module)))
            saved = contents.shapes(shared["buffers"])
            if engine.plan.policy.pipeline is not None:
                saved = {name: shape for name, shape in saved.items() if name in here}  # of this stage
            problems += check_buffers(saved, here, contents.persistent(engine.module))
        for word, about in check_meaning(manifest, table, shared, now).items():
            if ("schedule" if word == "schedule" else "optimizer") not in parts:
                without |= {word}
                continue
            problems += [] if word in without else about
            if about and word == "optimizer":
                without |= {"groups"}
            # Groups go with an optimizer that is not taken over.
            if not about and not (word == "groups" and "optimizer" in without):
                without -= {word}
        raise_damage(problems)
        said = [*apart, *differences(manifest, table, plan, now)]
        if own is None:
            said.append(CheckpointDifference("random numbers", f"of {manifest.ranks} ranks", "as they are"))
            if not shared["alike"]:
                said.append(
                    CheckpointDifference(
                        "client state", f"of {manifest.ranks} ranks", "none", "see `client_of`"
                    )
                )
        said += [CheckpointDifference(word, "as saved", "as this run has it") for word in sorted(without)]
        client = self._client(path, shared, own)
        judged = _Found(path, manifest, table, reader, shared, own, client, without, tuple(said))
        if _takes(judged, parts):
            contents.check_moments(engine, table, shared["counters"])
        if "optimizer" in parts and own is not None:
            states.check_random_state(own["random"])
        return judged

    def _put(self, saved: _Found, parts: frozenset[Part]) -> None:
        """What is neither weight nor moment nor random number."""
        engine, shared, own = self._engine, saved.shared, saved.own
        if "buffers" not in saved.without:
            states.put_buffers(engine.module, shared["buffers"] | ({} if own is None else own["buffers"]))
        if "counts" in parts:
            states.put_counts(engine, shared)
        if "loss_scale" not in saved.without:
            states.put_scale(engine, shared["scaler"])
        if "schedule" not in saved.without:
            states.put_schedule(engine, shared["schedule"])
        if "groups" not in saved.without:
            states.put_groups(engine, shared["groups"])
        if "optimizer" in parts and own is not None:
            states.put_modules(engine.module, own["modules"])

    def _client(self, path: Path, shared: dict[str, Any], own: dict[str, Any] | None) -> Any:
        if own is not None:
            return own["client"]
        if not shared["alike"]:
            return None
        return states.read_state(path, state_file(0))["client"]


_HALF_LOADED = Problem(
    "model",
    "must have the weights of one checkpoint",
    got="weights replaced in part",
    do="Load a whole checkpoint before the next step.",
)


def _takes(saved: _Found, parts: frozenset[Part]) -> bool:
    """Whether moments are loaded."""
    return "optimizer" in parts and "optimizer" not in saved.without


def everywhere(comm: Collectives, work: Callable[[], T]) -> T:
    """Do local work on every rank; when it fails on one, all raise what went wrong, each thing once."""
    done: list[T] = []
    with raise_on_all_ranks(comm):
        try:
            done.append(work())
        except ZerodriftError as error:
            raise CheckpointError.joined([error]) from error
        except Exception as error:
            raise CheckpointError("checkpoint", "must be read and written", got=said(error)) from error
    return done[0]
