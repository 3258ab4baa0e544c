"""`deepspeed.monitor`: write curves of a run to CSV files, TensorBoard and Weights & Biases.

Only rank 0 writes. A monitor that cannot start is an error before training. A monitor that fails later, for
example on a full disk, is logged once, and training goes on without it.
"""

from __future__ import annotations

import contextlib
import csv
import importlib.util
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import Field

from zerodrift.config import Block
from zerodrift.deepspeed.tools.functions import logger
from zerodrift.errors import ConfigError, first_line, said

MONITORS = ("tensorboard", "wandb", "csv_monitor")
"""The monitors' blocks in a config."""

Event = Sequence[Any]
"""Name, value, step."""


class CSVConfig(Block):
    """One CSV file per curve, in the folder `job_name` of `output_path`."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"


class TensorBoardConfig(CSVConfig):
    """Curves for TensorBoard, which must be installed."""


class WandbConfig(Block):
    """A run of Weights & Biases, which must be installed. `team` is the owner of the run."""

    enabled: bool = False
    group: str | None = None
    team: str | None = None
    project: str = "deepspeed"


class DeepSpeedMonitorConfig(Block):
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)

    @property
    def enabled(self) -> bool:
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Read the monitors' blocks of a whole config. A block that is null or missing is off."""
    written = {key: param_dict[key] for key in MONITORS if param_dict.get(key) is not None}
    return DeepSpeedMonitorConfig(**written)


class Monitor:
    """Base class of monitors. The settings of the block are attributes too."""

    def __init__(self, monitor_config: Any) -> None:
        self.monitor_config = monitor_config
        vars(self).update(dict(monitor_config))
        self.enabled = monitor_config.enabled
        self.writes = self.enabled and (not dist.is_initialized() or dist.get_rank() == 0)

    def write_events(self, event_list: Iterable[Event]) -> None:
        raise NotImplementedError


class csvMonitor(Monitor):  # noqa: N801
    """Writes `OUTPUT_PATH/JOB_NAME/Train_Samples_lr.csv`, named by the event."""

    def __init__(self, csv_config: CSVConfig) -> None:
        super().__init__(csv_config)
        self.log_dir = _make_folder("csv_monitor", csv_config) if self.writes else None

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
    def __init__(self, tensorboard_config: TensorBoardConfig) -> None:
        super().__init__(tensorboard_config)
        self.summary_writer: Any = None
        if self.writes:
            with _starting("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter

                folder = _make_folder("tensorboard", tensorboard_config)
                self.summary_writer = SummaryWriter(log_dir=str(folder))

    def write_events(self, event_list: Iterable[Event], flush: bool = True) -> None:
        if self.summary_writer is not None:
            for event in event_list:
                self.summary_writer.add_scalar(*event)
            if flush:
                self.flush()

    def flush(self) -> None:
        if self.summary_writer is not None:
            self.summary_writer.flush()


class WandbMonitor(Monitor):
    def __init__(self, wandb_config: WandbConfig) -> None:
        super().__init__(wandb_config)
        self._run: Any = None
        if self.writes:
            with _starting("wandb"):
                import wandb

                block = wandb_config
                self._run = wandb.init(project=block.project, group=block.group, entity=block.team)

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        if self._run is not None:
            self._run.log(data, step=step, commit=commit)

    def write_events(self, event_list: Iterable[Event]) -> None:
        for name, value, step in event_list:
            self.log({name: value}, step=step)


class MonitorMaster(Monitor):
    def __init__(self, monitor_config: DeepSpeedMonitorConfig) -> None:
        super().__init__(monitor_config)
        self.tb_monitor = self._make(TensorBoardMonitor, monitor_config.tensorboard)
        self.wandb_monitor = self._make(WandbMonitor, monitor_config.wandb)
        self.csv_monitor = self._make(csvMonitor, monitor_config.csv_monitor)
        self._failed: set[str] = set()

    def _make(self, kind: Any, block: Any) -> Any:
        return kind(block) if block.enabled and self.writes else None

    def write_events(self, event_list: Iterable[Event]) -> None:
        events = list(event_list)
        for monitor in (self.tb_monitor, self.wandb_monitor, self.csv_monitor):
            kind = type(monitor).__name__
            if monitor is None or kind in self._failed:
                continue
            try:
                monitor.write_events(events)
            except Exception as error:
                self._failed.add(kind)
                logger.warning("%s failed and is switched off: %s", kind, first_line(error))


@contextlib.contextmanager
def _starting(package: str) -> Iterator[None]:
    """Raise an error of a package as an error of its block in the config."""
    where = f"{package}.enabled"
    if importlib.util.find_spec(package) is None:
        must, do = f"`{package}` must be installed", f"Run `pip install {package}`."
        raise ConfigError(where, must, got="no such package", do=do)
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        must, do = f"`{package}` must be able to start", f"Fix its error, or turn `{where}` off."
        raise ConfigError(where, must, got=said(error), do=do) from error


def _make_folder(key: str, block: CSVConfig) -> Path:
    folder = Path(block.output_path) / block.job_name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where, must = f"{key}.output_path", "must be a folder that can be written"
        raise ConfigError(where, must, got=f"{folder}: {first_line(error)}") from error
    return folder
