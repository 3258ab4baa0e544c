"""The meaning of a config: `resolve` makes a policy, and `parameters` applies it to a model."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.policy.arguments import ANY, AutoValues, check_arguments
    from zerodrift.policy.backends import BACKENDS
    from zerodrift.policy.decisions import (
        Batch, COLUMNS, Columns, ComponentSpec, LinearProducts, LossScale, Master, Mode, MuonUpdate,
        OPTIONS, Order, Output, Pipelining, Placed, Placement, Policy, Reduction, ResolvedRule, Schedule,
        State, Update,
    )  # fmt: skip
    from zerodrift.policy.narrow import SLICED, TRAVEL, UNFIT
    from zerodrift.policy.order import (
        BY_RANK, CARRIED, DEFAULT_RANK, DeterminismNeed, GIVEN_UP, KEY, ORDER, REFUSED, SAME_BITS, SILENT,
        TIED, When, accumulators, assignment, for_parameters, micro_batches_of_rank, need_of, rank_levels,
        refuse_order, refuse_ranks, remedy,
    )  # fmt: skip
    from zerodrift.policy.parameters import HEADS, cut_tiles, decide_columns, exported_as
    from zerodrift.policy.pipelining import SINGLE, SPLIT, V_SHAPED, most_unfinished, queues
    from zerodrift.policy.resolver import SAFE_MODULES, mesh_for, resolve
    from zerodrift.policy.rules import PIN, PRODUCTS, glob, is_by_rule, matches
    from zerodrift.policy.support import (
        DEFAULT_ACCUMULATE, StateCell, SupportCell, narrow_storages, states, table, why_not_state,
    )  # fmt: skip

__getattr__, __dir__, __all__ = face(__name__)
