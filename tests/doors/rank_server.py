"""Run the jobs of one trainer in forked ranks, so that the trainer is imported once and not twice a job.

    python tests/doors/rank_server.py TRAINER DATA FOLDER JOB:STAGE ...

The trainer's own entry point is called with its own arguments, in two processes that have the environment of
`torchrun`'s. DATA is what `tiny.py` made. Each job writes `FOLDER/JOB-STAGE.json` and a log beside it. Under
`zerodrift run` the name `deepspeed` is the drop-in.

Invariant: when a job ends, no process of it is left.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.doors.methods import TRAINERS, Job

WORLD = 2
LIMIT = float(os.environ.get("DOORS_LIMIT", "300"))
"""Time limit of one command of a job."""
GRACE = 10.0
"""Seconds in which the other ranks may fail too."""


def entry_point(trainer: str) -> Callable[[Any], object]:
    """Import a trainer and return its entry point."""
    if trainer == "llamafactory":
        from llamafactory.train.tuner import run_exp

        return run_exp
    if trainer == "ms-swift":
        from swift.pipelines import pretrain_main, rlhf_main, sft_main

        verbs = {"sft": sft_main, "pt": pretrain_main, "rlhf": rlhf_main}
        return lambda words: verbs[words[0]](words[1:])
    from axolotl.cli.train import do_cli

    return lambda path: do_cli(config=path)


def run_ranks(call: Callable[[Any], object], argument: Any, log: Path, folder: Path) -> str:
    """Call a function on all ranks; return "" or the first rank's error."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        port = asked.getsockname()[1]
    failed = folder / "failed"
    shutil.rmtree(failed, ignore_errors=True)
    failed.mkdir(parents=True)
    ranks = {}
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            os.setsid()
            _be_rank(call, argument, rank, port, log, failed)
        ranks[pid] = rank
    until, failing = time.monotonic() + LIMIT, False
    alive = dict(ranks)
    try:
        while alive and time.monotonic() < until:
            for pid in list(alive):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    rank = alive.pop(pid)
                    if (failed / f"{rank}.json").exists() and not failing:
                        failing, until = True, min(until, time.monotonic() + GRACE)
            time.sleep(0.02)
    finally:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if pid in alive:
                os.waitpid(pid, 0)
    errors = [json.loads(path.read_text()) for path in failed.glob("*.json")]
    if errors:
        return str(min(errors, key=lambda error: error["time"])["said"])
    _import(failed / "modules")
    missing = [rank for rank in range(WORLD) if not (failed / f"{rank}.done").exists()]
    if not missing:
        return ""
    return f"ranks {missing} did not end" if alive else f"ranks {missing} ended without an error"


def _import(names: Path) -> None:
    """Import the modules that an earlier rank has imported."""
    for name in names.read_text().splitlines() if names.exists() else ():
        if name.isidentifier() or "." in name:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _be_rank(
    call: Callable[[Any], object], argument: Any, rank: int, port: int, log: Path, failed: Path
) -> None:
    """Be one rank, until the process ends."""
    code = 1
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(WORLD),
            LOCAL_WORLD_SIZE=str(WORLD),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="doors",
        )
        before = set(sys.modules)
        torch.manual_seed(0)  # torch seeds itself otherwise, and some trainers draw weights before they seed
        call(argument)
        if rank == 0:
            (failed / "modules").write_text("\n".join(name for name in sys.modules if name not in before))
        (failed / f"{rank}.done").touch()
        code = 0
    except BaseException as error:
        traceback.print_exc()
        said = {"time": time.time(), "said": f"{type(error).__name__}: {error}"}
        (failed / f"{rank}.json").write_text(json.dumps(said))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def history(folder: Path) -> list[float]:
    """Return the losses that a command logged, of training, evaluation and rewards."""
    states = sorted(folder.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    entries = json.loads(states[-1].read_text())["log_history"] if states else []
    return [float(entry[key]) for entry in entries for key in LOGGED if key in entry]


LOGGED = ("loss", "eval_loss", "reward")


def weights(folder: Path) -> dict[str, list[Any]]:
    """Return shape and norm of each tensor in the files of weights that a command saved last."""
    from safetensors.torch import load_file

    found: dict[str, list[Any]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            found[f"{path.name}:{name}"] = [list(tensor.shape), tensor.double().norm().item()]
    return found


def run_job(call: Callable[[Any], object], job: Job, stage: int, data: Path, folder: Path) -> None:
    """Run the commands of a job at one stage, and write the results."""
    name, began = f"{job.name}-{stage}", time.monotonic()
    out, log = folder / name, folder / f"{name}.log"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    log.unlink(missing_ok=True)
    said, losses, saved = "", [], {}
    for number, arguments in enumerate(job.commands):
        own = out / f"{number}"
        own.mkdir()
        names = {"data": data, "stage": stage, "out": own, "first": out / "0"}
        said = run_ranks(call, job.form(arguments, names), log, own)
        losses += history(own)
        saved = weights(own)
        if said:
            break
    text = re.sub(rf"{re.escape(str(out))}|{re.escape(str(data))}", "...", said)
    told = {"said": text, "losses": losses, "saved": saved, "seconds": round(time.monotonic() - began, 1)}
    (folder / f"{name}.json").write_text(json.dumps(told))
    shutil.rmtree(out, ignore_errors=True)
    print(f"{name}: {text[:200] or f'{len(losses)} losses'} ({told['seconds']} s)", flush=True)


def main(words: Sequence[str]) -> None:
    trainer, data, folder, *asked = words
    call = entry_point(trainer)
    jobs = {job.name: job for job in TRAINERS[trainer].jobs}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for pair in asked:
        name, _, stage = pair.rpartition(":")
        run_job(call, jobs[name], int(stage), Path(data), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
