"""Measure what the dtypes of a plan cost, and which pins pay for themselves."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.audit.advice import parse_goal
    from zerodrift.inspect.audit.entry import audit, audit_subject
    from zerodrift.inspect.audit.estimates import probe, require_probe
    from zerodrift.inspect.audit.report import Audit, audit_page
    from zerodrift.inspect.audit.runs import (
        LOSSES, REFUSED, Signals, Subject, changed_routes, forward_signals, load_subject, measure_gaps,
        router_flips, running, this_rank,
    )  # fmt: skip
    from zerodrift.inspect.audit.tokens import (
        Batch, Ids, Recorded, read_ids, read_recorded, require_vocabulary,
    )  # fmt: skip
    from zerodrift.inspect.audit.variants import literal_glob, make_rule, without_update

__getattr__, __dir__, __all__ = face(__name__)
