"""`deepspeed.monitor.config`: the blocks of a config that say where curves of a run are written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from zerodrift.config.schema import Block
from zerodrift.deepspeed import unsupported
from zerodrift.errors import ConfigError, Problems

__all__ = [
    "CSVConfig",
    "DeepSpeedMonitorConfig",
    "TensorBoardConfig",
    "WandbConfig",
    "get_monitor_config",
]

MONITORS = ("tensorboard", "wandb", "csv_monitor")
"""Blocks that are obeyed."""


class TensorBoardConfig(Block):
    """Curves for TensorBoard."""

    enabled: bool = False
    """Whether they are written; `tensorboard` must be installed."""
    output_path: str = ""
    """The folder in which a folder of the job is made."""
    job_name: str = "DeepSpeedJobName"
    """The name of that folder."""


class WandbConfig(Block):
    """A run of Weights & Biases."""

    enabled: bool = False
    """Whether there is one; `wandb` must be installed."""
    group: str | None = None
    """What runs are grouped by."""
    team: str | None = None
    """Whose it is."""
    project: str = "deepspeed"
    """Its project."""


class CSVConfig(Block):
    """A CSV file for each curve."""

    enabled: bool = False
    """Whether they are written."""
    output_path: str = ""
    """The folder in which a folder of the job is made."""
    job_name: str = "DeepSpeedJobName"
    """The name of that folder."""


class DeepSpeedMonitorConfig(Block):
    """All of them."""

    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    """CSV files."""

    @property
    def enabled(self) -> bool:
        """Whether anything is written."""
        return self.tensorboard.enabled or self.wandb.enabled or self.csv_monitor.enabled


def get_monitor_config(param_dict: Mapping[str, Any]) -> DeepSpeedMonitorConfig:
    """Of a whole config. A block that is null or left out is off."""
    written = {key: param_dict[key] for key in MONITORS if param_dict.get(key) is not None}
    problems = Problems()
    for key, value in written.items():
        if not isinstance(value, Mapping):
            problems.add(key, "must be a block", got=repr(value), do='Write `{"enabled": true}`.')
    problems.raise_as(ConfigError)
    return DeepSpeedMonitorConfig(**{key: dict(value) for key, value in written.items()})


__getattr__ = unsupported.lookup(__name__)
