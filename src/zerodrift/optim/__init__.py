"""Updates on flat shards: the optimizers, the master schemes, the moments' dtypes, the schedules."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.optim import flat
    from zerodrift.optim.elementwise import RefuseNewData, declare, require_for_dtensors
    from zerodrift.optim.offload import hold_parameters, make_updater
    from zerodrift.optim.flat import TORCH_DECAY, keys_of_blocks
    from zerodrift.optim.fused import UpdateFunction, update
    from zerodrift.optim.rounding import round_away, split
    from zerodrift.optim.schedules import (
        SCHEDULES, VALID_LR_SCHEDULES, WARMUP_LOG_RATE, is_warmup_type, make_schedule, schedule_of,
    )  # fmt: skip
    from zerodrift.optim.torch_optimizer import group_of, loaded_state, saved_state
    from zerodrift.optim.updater import Counters, GroupMembers, OptimizerState, Owned, Updater, learning_rates
    from zerodrift.optim.updates import COLUMNS, reference_update

__getattr__, __dir__, __all__ = face(__name__)
