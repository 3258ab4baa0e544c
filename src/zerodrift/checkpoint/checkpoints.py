"""Save and load checkpoints of an engine, on any number of ranks and at any stage.

Invariant: a run that is killed at any moment and resumed from the newest checkpoint, on as many ranks and at
the same stage, ends in the bits of a run that was not killed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from zerodrift.checkpoint import contents
from zerodrift.checkpoint import differences as compare
from zerodrift.checkpoint import manifest as manifests
from zerodrift.checkpoint import state as states
from zerodrift.checkpoint.differences import Allowed, CheckpointDifference, check_allowed
from zerodrift.checkpoint.folder import LATEST, CheckpointFolder, automatic, check_tag
from zerodrift.checkpoint.manifest import SHARED, Manifest, Sums, raise_damage, state_file
from zerodrift.checkpoint.save import Head, Save, everywhere, on_rank_0, over_ranks, require_own
from zerodrift.checkpoint.tensors import CheckpointReader
from zerodrift.engine import Digest, Engine
from zerodrift.errors import CheckpointError, Problem, UnsupportedError, ZerodriftError
from zerodrift.model import non_persistent_buffers
from zerodrift.optim import Counters

Parts = Literal["all", "weights"]
Part = Literal["optimizer", "schedule", "counts"]
"""`optimizer` has moments, groups, loss scale and random numbers; `counts` has the numbers of steps."""
ALL: frozenset[Part] = frozenset(get_args(Part))


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was loaded."""

    path: Path
    tag: str
    step: int
    """Optimizer steps taken when it was saved."""
    client: Any
    """The client state that this rank gave to `save`. On another number of ranks: the state that all of them
    gave, or None if their states differed."""
    differences: tuple[CheckpointDifference, ...]
    """Differences from the run that was saved; empty for an exact continuation."""

    def client_of(self, rank: int) -> Any:
        """Return the client state that one of the saving ranks gave."""
        return states.read_state(self.path, state_file(rank))["client"]


@dataclass(frozen=True, slots=True)
class _SavedRun:
    """A checkpoint that was read, except its tensors, and compared with the run."""

    table: contents.Table
    reader: CheckpointReader
    shared: dict[str, Any]
    own: dict[str, Any] | None
    """This rank's state; None on another number of ranks."""
    without: frozenset[Allowed]
    """Subjects that stay as the run has them."""
    differences: tuple[CheckpointDifference, ...]
    takes_moments: bool
    client: Any


class Checkpoints:
    """The checkpoints of one engine in one folder. Every rank creates one and calls it in the same way."""

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
        """Open `folder` for the checkpoints of `engine`.

        `keep` is the number of checkpoints with automatic tags to keep; 0 keeps all. `asynchronous` copies
        the state and writes it while training goes on. `quiet` prints nothing. `run` names a run that also
        saves elsewhere; without it a name is drawn. A folder with another run's checkpoints is refused at the
        first step, unless one of them was loaded. In a `shared` folder they are accepted, and a save may
        replace a checkpoint of another run or of DeepSpeed.
        """
        if type(keep) is not int or keep < 0:
            raise CheckpointError("keep", "must be a whole number of at least 0", got=repr(keep))
        self._engine = engine
        self._comm = engine.comm
        self._folder = CheckpointFolder(folder, shared=shared)
        self._keep, self._asynchronous, self._quiet, self._shared = keep, asynchronous, quiet, shared
        there: dict[str, str] = {}
        if self._comm.mesh.rank() == 0 and not shared:
            with contextlib.suppress(CheckpointError, OSError):  # the first use of the folder raises it
                there = self._folder.runs()
        self.run, self._runs = self._comm.broadcast_object((run or uuid.uuid4().hex, there), 0)
        """The name of this run, or of the run that was loaded."""
        self._pending: Save | None = None
        if self._runs and engine.progress.background is None:
            engine.progress.background = self
        self.digest: Digest | None = None
        """Digest of the state that was saved or loaded last. None before, or if a conversion was loaded."""

    def save(
        self,
        tag: str | None = None,
        client: Any = None,
        *,
        latest: bool = True,
        frozen: bool = True,
        within: bool = False,
    ) -> None:
        """Save the run under `tag`, by default the number of its step. `client` is any state that the caller
        wants back on this rank, such as its position in the data. `frozen=False` leaves frozen parameters
        out; such a checkpoint loads with `allow=("model",)`. `within=True` allows a save in the middle of a
        step. Gradients are not saved, so a run that resumes begins that step anew."""
        engine, comm = self._engine, self._comm
        if not within:
            self._require_between_steps("save")
        self.wait()
        tag = automatic(engine.global_steps) if tag is None else tag
        check_tag(tag)
        # Digests find the buffers that differ between ranks.
        buffers = {name: states.bits_digest(value) for name, value in engine.module.named_buffers()}
        mine = (buffers, states.fingerprint(client))
        digests, first = comm.broadcast_object(mine, 0)
        different = frozenset(name for name, digest in mine[0].items() if digests.get(name) != digest)

        def prepare() -> tuple[bytes, Counters]:
            counters = {} if engine.updater is None else engine.updater.counters()
            return states.packed(states.rank_state(engine, client, different), "client"), counters

        own, counters = everywhere(comm, prepare)
        counters = contents.merged(comm.all_gather_object(counters, "data"))
        stages = comm.gather_object(contents.summary(engine, counters, digests), "pipeline")
        alike = not over_ranks(comm, np.array([mine[1] != first], np.int64))[0]
        self.digest = digest = engine.digest()

        def summarize() -> Head | None:
            if comm.mesh.rank():
                return None
            return contents.head(engine, self.run, tag, stages, digest, alike=alike, frozen=frozen)

        head = everywhere(comm, summarize)
        save = Save(comm, self._folder, None if self._shared else self.run, head, latest)
        if self._asynchronous:
            self._pending = save
            engine.progress.background = self
            items = contents.items(engine, frozen)
            save.start(lambda: [item.copied() for item in items], own)
        else:
            save.write(contents.items(engine, frozen), own)
            self._print(f"saved {save.finish(self._keep)}")

    def wait(self) -> None:
        """Wait until a save under way is complete; raises on every rank if it failed."""
        if self._pending is not None:
            save, self._pending = self._pending, None
            self._engine.progress.background = None
            self._print(f"saved {save.finish(self._keep)}")

    def check(self) -> None:
        """Finish a save once its files are written. The engine calls this in each step until then, and in the
        first step of a run."""
        if self._pending is None:
            self._engine.progress.background = None
            require_own(self._folder, self._runs, self.run)
        elif self._pending.done():
            self.wait()

    finish = wait
    """The engine calls this before it is destroyed."""

    def abandon(self) -> None:
        """Drop a save under way. The engine calls this if an exception ends this rank."""
        if self._pending is not None:
            save, self._pending = self._pending, None
            self._engine.progress.background = None
            save.abandon()

    def _print(self, text: str) -> None:
        if not self._quiet and self._comm.mesh.rank() == 0:
            print(f"zerodrift: {text}", flush=True)

    def _require_between_steps(self, what: str) -> None:
        count = self._engine.micro_batches
        if count:
            got = f"{count} micro-batches of a step that has not ended"
            do = "Call it after a `step` that updated or skipped."
            raise UnsupportedError(what, "must be called between steps", got=got, do=do)

    def resume(self, *, allow: Collection[Allowed] = ()) -> Loaded | None:
        """Load the newest checkpoint, or return None if none was ever saved here, as in a new run."""
        self._require_between_steps("resume")
        self.wait()
        path = on_rank_0(self._comm, self._folder.newest)
        return None if path is None else self._load(path, ALL, check_allowed(allow), True)

    def load(
        self, tag: str = LATEST, *, parts: Parts = "all", allow: Collection[Allowed] = (), verify: bool = True
    ) -> Loaded:
        """Load a checkpoint. `parts="weights"` leaves optimizer, schedule, counters and random numbers alone.
        `allow` names the differences to accept. `verify` compares the checksums of all files before anything
        is changed, each rank those of its share. Without it, damaged bits are loaded."""
        if parts not in get_args(Parts):
            raise CheckpointError("parts", "must be 'all' or 'weights'", got=repr(parts))
        return self.load_parts(tag, ALL if parts == "all" else frozenset(), allow, verify)

    def load_parts(
        self, tag: str, parts: frozenset[Part], allow: Collection[Allowed] = (), verify: bool = True
    ) -> Loaded:
        """Load the weights and the given parts."""
        self._require_between_steps("load")
        self.wait()
        path = on_rank_0(self._comm, lambda: self._folder.find(tag))
        return self._load(path, parts, check_allowed(allow), verify)

    def _load(self, path: Path, parts: frozenset[Part], without: frozenset[Allowed], verify: bool) -> Loaded:
        engine, comm = self._engine, self._comm
        manifest = self._verified(path, verify)
        saved = everywhere(comm, lambda: self._judged(path, manifest, parts, without))
        restore = everywhere(comm, lambda: states.copied(engine))
        try:
            # State that may still be refused is restored before the first weight is.
            stays: set[str] = set(saved.without)
            if "optimizer" not in parts:
                stays.add("modules")
            if "counts" not in parts:
                stays.add("counts")
            everywhere(comm, lambda: states.put(engine, saved.shared, saved.own, stays))
        except ZerodriftError:
            restore()
            raise
        counters = saved.shared["counters"] if saved.takes_moments else None
        try:
            everywhere(comm, lambda: contents.fill(engine, saved.reader, saved.table, counters))
            ranks = saved.shared.get("feedback", 0) if counters is not None else 0
            everywhere(comm, lambda: contents.fill_feedback(engine, saved.reader, ranks))
        except CheckpointError as error:
            must, got = "must have the weights of one checkpoint", "weights replaced in part"
            half_loaded = Problem("model", must, got=got, do="Load a whole checkpoint before the next step.")
            raise CheckpointError.of([*error.problems, half_loaded]) from error
        engine.sync_storage()
        if "optimizer" in parts and saved.own is not None:
            states.put_random_state(saved.own["random"], engine.mesh.device)
        self.run = manifest.run
        self.digest = None
        digests = dict(manifest.digests)
        if digests and all(row.name in saved.table for row in engine.plan.rows):
            self.digest = engine.digest()
            contents.require_saved(engine, digests, self.digest, path, moments=saved.takes_moments)
        for text in (f"loaded {path}, step {manifest.step}", *(f"  {each}" for each in saved.differences)):
            self._print(text)
        return Loaded(path, manifest.tag, manifest.step, saved.client, saved.differences)

    def _verified(self, path: Path, verify: bool) -> Manifest:
        """Verify the files, each rank a share, and return the manifest."""
        comm = self._comm
        rank, ranks = comm.mesh.rank(), comm.mesh.size("world")

        def check() -> tuple[Manifest, Sums]:
            manifest = manifests.read_manifest(path)
            problems, sums = manifests.damage_seen(path, manifest, content=verify, rank=rank, ranks=ranks)
            raise_damage(problems)
            return manifest, sums

        manifest, sums = everywhere(comm, check)
        raise_damage(manifests.other_files(path, manifest, over_ranks(comm, sums)))
        return manifest

    def _judged(
        self, path: Path, manifest: Manifest, parts: frozenset[Part], without: frozenset[Allowed]
    ) -> _SavedRun:
        """Read everything but the tensors, and compare it with the run."""
        engine, now = self._engine, contents.running(self._engine)
        table, reader = manifests.read_entries(path), CheckpointReader(path)
        strict = "model" not in without
        notes = compare.check_model(table, engine.plan, str(path), strict)
        if not strict:
            known = {name for row in engine.plan.rows for name in row.names}
            table = tuple(entry for entry in table if known & set(entry.names))
            without -= set() if notes else {"model"}
        shared = states.read_state(path, SHARED)
        rank, ranks = self._comm.mesh.rank(), self._comm.mesh.size("world")
        own = states.read_state(path, state_file(rank)) if manifest.ranks == ranks else None
        problems: list[Problem] = []
        if "buffers" not in without:
            here = {name: list(buffer.shape) for name, buffer in engine.module.named_buffers()}
            saved = {name: list(buffer.shape) for name, buffer in shared["buffers"].items()}
            if engine.plan.policy.pipeline is not None:  # the checkpoint has those of all stages
                saved = {name: shape for name, shape in saved.items() if name in here}
            persistent = here.keys() - non_persistent_buffers(engine.module)
            problems += compare.check_buffers(saved, here, persistent)
        for word, found in compare.check_meaning(manifest, table, shared, now).items():
            if ("schedule" if word == "schedule" else "optimizer") not in parts:
                without |= {word}
            elif found:
                problems += [] if word in without else found
                if word == "optimizer":  # its groups stay with it
                    without |= {"groups"}
            elif word != "groups" or "optimizer" not in without:
                without -= {word}
        raise_damage(problems)
        notes = [*notes, *compare.differences(manifest, table, reader.plan, now)]
        if own is None:
            of = f"of {manifest.ranks} ranks"
            notes.append(CheckpointDifference("random numbers", of, "as they are"))
            if not shared["alike"]:
                notes.append(CheckpointDifference("client state", of, "none", "see `client_of`"))
        notes += [CheckpointDifference(word, "as saved", "as this run has it") for word in sorted(without)]
        takes_moments = "optimizer" in parts and "optimizer" not in without
        if takes_moments and engine.updater is not None:
            contents.check_counters(shared["counters"])
        by_name = {name: entry for entry in table for name in entry.names}
        contents.check_held(engine, reader, by_name, shared["counters"] if takes_moments else None)
        if "optimizer" in parts and own is not None:
            difference = states.check_random_state(own["random"], engine.mesh.device)
            notes += [] if difference is None else [difference]
        holder = states.read_state(path, state_file(0)) if own is None and shared["alike"] else own
        client = None if holder is None else holder["client"]
        return _SavedRun(by_name, reader, shared, own, without, tuple(notes), takes_moments, client)
