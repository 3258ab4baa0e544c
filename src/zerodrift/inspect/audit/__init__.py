"""Measure what the dtypes of a plan cost, and which pins pay for themselves."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.audit.entry import audit, audit_subject
    from zerodrift.inspect.audit.estimates import probe, require_probe
    from zerodrift.inspect.audit.narrow_search import parse_goal
    from zerodrift.inspect.audit.page import audit_page
    from zerodrift.inspect.audit.run import REFUSED, Subject, load_subject, running, this_rank
    from zerodrift.inspect.audit.signals import LOSSES, Signals, forward_signals, measure_gaps, router_flips
    from zerodrift.inspect.audit.text import Audit, audit_json
    from zerodrift.inspect.audit.tokens import (
        Batch, Ids, Recorded, read_ids, read_recorded, require_vocabulary,
    )  # fmt: skip
    from zerodrift.inspect.audit.variants import literal_glob, make_rule, without_update

__getattr__, __dir__, __all__ = face(__name__)
