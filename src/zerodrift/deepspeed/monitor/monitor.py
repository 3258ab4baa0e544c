"""`deepspeed.monitor.monitor`: numbers by name and step, to whatever the config's blocks ask for.

Rank 0 writes; on other ranks a monitor does nothing. What cannot be written after training has begun (a full
disk, a service that is away) is said once, and the run goes on without it.

Invariant: what is asked for and cannot be begun is an error before training.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zerodrift.deepspeed import unsupported
from zerodrift.deepspeed.monitor.config import (
    CSVConfig,
    DeepSpeedMonitorConfig,
    TensorBoardConfig,
    WandbConfig,
)
from zerodrift.deepspeed.utils.logging import logger
from zerodrift.errors import ConfigError, first_line, said

__all__ = ["Monitor", "MonitorMaster"]

Event = Sequence[Any]
"""Name, value, step."""


class Monitor(ABC):
    """What takes events."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config

    @abstractmethod
    def write_events(self, event_list: Iterable[Event]) -> None: ...


class csvMonitor(Monitor):  # noqa: N801
    """`OUTPUT_PATH/JOB_NAME/Train_Samples_lr.csv`, by name of the event."""

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config)
        self.enabled = csv_config.enabled
        self.output_path, self.job_name = csv_config.output_path, csv_config.job_name
        self.log_dir = _folder("csv_monitor", csv_config) if self.enabled and _writes() else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        if self.log_dir is None:
            return
        for name, value, step in event_list:
            with (self.log_dir / f"{name.replace('/', '_').replace(' ', '_')}.csv").open("a") as file:
                rows = csv.writer(file)
                if not file.tell():
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])


class TensorBoardMonitor(Monitor):
    """Scalars by name."""

    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config)
        self.enabled = tensorboard_config.enabled
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer: Any = None
        if self.enabled and _writes():
            with _begun("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                self.summary_writer = SummaryWriter(log_dir=str(_folder("tensorboard", tensorboard_config)))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.summary_writer is None:
            return
        for event in event_list:
            self.summary_writer.add_scalar(*event)
        if flush:
            self.summary_writer.flush()

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    """What `wandb.log` is given."""

    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config)
        self.enabled = wandb_config.enabled
        self.group, self.team, self.project = wandb_config.group, wandb_config.team, wandb_config.project
        self._run: Any = None
        if self.enabled and _writes():
            with _begun("wandb"):
                import wandb

                self._run = wandb.init(project=self.project, group=self.group, entity=self.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, step in event_list:
            self.log({name: value}, step=step)


class MonitorMaster(Monitor):
    """All that a config asks for."""

    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)
        self.enabled = monitor_config.enabled
        self.tb_monitor = _made(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = _made(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = _made(csvMonitor, monitor_config.csv_monitor)
        self._lost: set[str] = set()

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            kind = type(monitor).__name__
            if monitor is None or kind in self._lost:
                continue
            try:
                monitor.write_events(events)
            except Exception as error:
                self._lost.add(kind)
                logger.warning("%s: nothing more is written: %s", kind, first_line(error))


def _made(kind: Callable[[Any], Any], block: Any) -> Any:
    return kind(block) if block.enabled and _writes() else None


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextlib.contextmanager
def _begun(package: str) -> Iterator[None]:
    """What a package raises when it begins is an error of its block."""
    where = f"{package}.enabled"
    if importlib.util.find_spec(package) is None:
        must, do = f"`{package}` must be installed", f"Run `pip install {package}`."
        raise ConfigError(where, must, got="no such package", do=do)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        must, do = f"`{package}` must be able to begin", f"Mend what it says, or switch `{where}` off."
        raise ConfigError(where, must, got=said(error), do=do) from error


def _folder(key: str, block: TensorBoardConfig | CSVConfig) -> Path:
    folder = Path(block.output_path) / block.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where, must = f"{key}.output_path", "must be a folder that can be written"
        raise ConfigError(where, must, got=f"{folder}: {first_line(error)}") from error
    return folder


__getattr__ = unsupported.lookup(__name__)
