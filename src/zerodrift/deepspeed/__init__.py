"""The drop-in: `import zerodrift.deepspeed as deepspeed`, and a DeepSpeed script runs on zerodrift.

Names, signatures and meanings are those of DeepSpeed 0.19.6; where it is silently wrong this is right, which
`docs/deepspeed.md` lists. A name that is not here says so when it is used, and what to use instead.

What each file has: `launch` joins the ranks, `written` is the config as it was passed, `assemble` is
`initialize`, `engine` its methods, `getters` its getters, `zero` and `parameters` parameters in pieces,
`states` their full values, `checkpoints` and `consolidated` files, `estimates` memory; `comm`, `utils`,
`ops`, `runtime`, `moe`, `launcher`, `accelerator` and `pipe` stand where DeepSpeed has them.
"""

from __future__ import annotations

import argparse

from zerodrift.alias import activate
from zerodrift.deepspeed import accelerator, comm, ops, pipe, runtime, unsupported, utils, zero
from zerodrift.deepspeed.accelerator import get_accelerator
from zerodrift.deepspeed.assemble import initialize
from zerodrift.deepspeed.engine import DeepSpeedEngine
from zerodrift.deepspeed.launch import init_distributed
from zerodrift.deepspeed.optimizer import DeepSpeedOptimizer
from zerodrift.deepspeed.runtime.activation_checkpointing import checkpointing
from zerodrift.deepspeed.runtime.dataloader import DeepSpeedDataLoader
from zerodrift.deepspeed.utils.logging import log_dist, logger
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


unsupported.AbsentModules.begin()

__getattr__ = unsupported.lookup(__name__, "checkpoint", "constants", "git_version_info", "launcher", "moe")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed` and `--deepspeed_config`, and their old spellings."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    switch = "helper flag for user code, no impact on the engine"
    group.add_argument("--deepspeed", default=False, action="store_true", help=f"Enable DeepSpeed ({switch})")
    group.add_argument(
        "--deepspeed_config", default=None, type=str, help="DeepSpeed json configuration file."
    )
    group.add_argument("--deepscale", default=False, action="store_true", help=f"Old spelling ({switch})")
    group.add_argument("--deepscale_config", default=None, type=str, help="Old spelling of the config file.")
    return parser
