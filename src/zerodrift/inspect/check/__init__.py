"""Findings about a run of any library: its table, its page, and what to do about what costs precision."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.check import compare, table
    from zerodrift.inspect.check.compare import hidden, nondeterministic, unexpected
    from zerodrift.inspect.check.findings import run_findings
    from zerodrift.inspect.check.launch import Observation, RunRecord, observe, run
    from zerodrift.inspect.check.report import run_page, run_text
    from zerodrift.inspect.check.table import completed, differences, encoded, read

__getattr__, __dir__, __all__ = face(__name__)
