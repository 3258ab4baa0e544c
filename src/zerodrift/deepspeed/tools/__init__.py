"""Functions and classes of DeepSpeed without an engine: log, collectives, loaders, device, curves, ops."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.deepspeed.tools import collectives
    from zerodrift.deepspeed.tools.collectives import PORT, get_world_group, init_distributed, local_rank
    from zerodrift.deepspeed.tools.curves import (
        DeepSpeedMonitorConfig, MONITORS, MonitorMaster, get_monitor_config,
    )  # fmt: skip
    from zerodrift.deepspeed.tools.data import DeepSpeedDataLoader
    from zerodrift.deepspeed.tools.device import get_accelerator
    from zerodrift.deepspeed.tools.functions import (
        LEAF_MODULE, get_z3_leaf_modules, log_dist, logger, mark_configured_leaves,
        register_external_parameter, z3_leaf_parameter,
    )  # fmt: skip
    from zerodrift.deepspeed.tools.optimizers import OVER_PARAMETERS

__getattr__, __dir__, __all__ = face(__name__)
