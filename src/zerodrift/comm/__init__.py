"""Comm: ranks and what they say to one another. `mesh` seats the ranks, `collectives` moves and sums."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.comm.call_stack import is_the_users
    from zerodrift.comm.collectives import Collectives, DIRECT, Handle, Recorded, travels_by_halves
    from zerodrift.comm.fold import Sum, carries, leftovers
    from zerodrift.comm.mesh import AxisName, Mesh, leave_slowly, start, started, usable_accelerator
    from zerodrift.comm.shared import can_share
    from zerodrift.comm.shared_errors import Alarm, raise_on_all_ranks

__getattr__, __dir__, __all__ = face(__name__)
