"""The drop-in: `import zerodrift.deepspeed as deepspeed`, and a DeepSpeed script runs on zerodrift.

Names, signatures and meanings are those of DeepSpeed 0.19.6; `docs/deepspeed.md` lists the differences. A
name that zerodrift does not have can be imported, and raises an error with advice when it is used.

`modules.py` makes DeepSpeed's modules (`deepspeed.zero`, `deepspeed.utils`, ...) from the tables in
`tables.py`. `tools` needs no engine, and `parameters` works on single parameters.
"""

from __future__ import annotations

import argparse

from zerodrift.alias import activate
from zerodrift.deepspeed.engine import DeepSpeedEngine
from zerodrift.deepspeed.initialization import initialize
from zerodrift.deepspeed.modules import DeepSpeedModules, lookup
from zerodrift.deepspeed.tables import ROOT
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.tools.collectives import init_distributed
from zerodrift.deepspeed.tools.device import get_accelerator
from zerodrift.deepspeed.tools.functions import DeepSpeedDataLoader, log_dist, logger
from zerodrift.errors import ConfigError as DeepSpeedConfigError
from zerodrift.versions import DEEPSPEED

__version__ = DEEPSPEED
__git_hash__ = __git_branch__ = "unknown"
__version_major__, __version_minor__, __version_patch__ = map(int, DEEPSPEED.split("."))

__all__ = [
    "DeepSpeedConfigError",
    "DeepSpeedDataLoader",
    "DeepSpeedEngine",
    "DeepSpeedOptimizer",
    "accelerator",
    "activate",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "pipe",
    "runtime",
    "utils",
    "zero",
]

DeepSpeedModules.install()
_look_up = lookup(ROOT)


def __getattr__(name: str) -> object:
    if name == "checkpointing":
        return _look_up("runtime").activation_checkpointing.checkpointing
    return _look_up(name)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, and their old spellings."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    switch = "helper flag for user code, no impact on the engine"
    add = group.add_argument
    add("--deepspeed", default=False, action="store_true", help=f"Enable DeepSpeed ({switch})")
    add("--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file.")
    add("--deepscale", default=False, action="store_true", help=f"Old spelling ({switch})")
    add("--deepscale_config", default=None, type=str, help="Old spelling of the config file.")
    return parser
