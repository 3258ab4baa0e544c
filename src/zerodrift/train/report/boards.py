"""TensorBoard and Weights & Biases, where a job asks for them: the numbers of `metrics.jsonl`, live.

Both are other people's packages and neither is needed. A run that goes on from a checkpoint goes on in the
same curves: steps that were taken after that checkpoint are taken back.

Invariant: a board that is asked for and not installed is an error before anything is started.
"""

from __future__ import annotations

import importlib.util
import json
import uuid
from collections.abc import Mapping
from typing import Protocol

from zerodrift.errors import ConfigError, Problems
from zerodrift.train.loop.job import Run
from zerodrift.train.loop.run_folder import RunFolder


class Board(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_boards(run: Run) -> None:
    """Refuse a board that is not installed."""
    problems = Problems()
    for key, wanted in (("tensorboard", run.tensorboard), ("wandb", bool(run.wandb))):
        if wanted and importlib.util.find_spec(key) is None:
            problems.add(
                f"run.{key}",
                f"`{key}` must be installed",
                got="no such package",
                do=f"Run `pip install {key}`.",
            )
    problems.raise_as(ConfigError)


def boards(folder: RunFolder, run: Run, after: int) -> list[Board]:
    """Those that the job asks for; `after` is the step that the run goes on from."""
    opened: list[Board] = []
    if run.tensorboard:
        opened.append(_TensorBoard(folder, after))
    if run.wandb:
        opened.append(_Wandb(folder, run.wandb, after))
    return opened


class _TensorBoard:
    def __init__(self, folder: RunFolder, after: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder.events), purge_step=after + 1 if after else None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for key, value in numbers.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: RunFolder, project: str, after: int) -> None:
        import wandb

        if not after or not folder.wandb.exists():
            folder.wandb.write_text(uuid.uuid4().hex[:8])
        name = folder.wandb.read_text()
        # A run of theirs takes no step twice: what was logged after the checkpoint stays, once.
        self._run = wandb.init(
            project=project,
            id=name,
            name=folder.path.name,
            dir=str(folder.path),
            config=json.loads(folder.job.read_text()),
            resume="allow",
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()
