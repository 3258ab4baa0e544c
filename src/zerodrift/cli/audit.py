"""Measure the numerics of a model: `audit`.

Invariant: a run is only read, and every figure that is printed as a fact was measured.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import typer

from zerodrift.cli import options, streams
from zerodrift.cli.plan import is_job, require_model, write_page
from zerodrift.errors import ConfigError

if TYPE_CHECKING:
    from zerodrift.inspect.audit import Batch, Subject
    from zerodrift.plan import Plan


def audit(
    source: options.JobOrConfig,
    model: options.ModelOfConfig = None,
    weights: options.WeightsOfModel = None,
    tokens: options.TokensOfAudit = None,
    batches: options.Batches = 4,
    budget: options.Budget = "1%",
    of: options.BudgetOf = "rest",
    confirm: options.Confirm = 8,
    narrow: options.Narrow = None,
    set_: options.Set = None,
    html: options.HtmlAudit = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Measure what every dtype of a model costs in log-probabilities, and which pins buy it back.

    Every cell is estimated in three passes; what is worth most is replayed, one cell at a time; pins are
    taken while they fit the budget, each set is run, and the rules to paste are printed. What is not as it
    should be is told first. Under torchrun every rank takes its share.

    \b
    Examples:
      zerodrift audit examples/jobs/lab.yaml
      zerodrift audit config.yaml --model path/to/model --data ids.npy \\
        --html audit.html
      zerodrift audit config.yaml --model package.module:function \\
        --budget 0.5% --of wire --narrow bytes
    """
    with streams.errors(debug):
        if of not in ("rest", "peak", "wire"):
            raise typer.BadParameter("must be rest, peak or wire", param_hint="--of")
        share = _parse_share(budget)
        from zerodrift.inspect.audit import audit_json, audit_subject, load_subject, parse_goal, this_rank

        goal = None if narrow is None else parse_goal(narrow, "--narrow")
        rank = this_rank()
        is_watched = not rank and streams.is_watched()
        with streams.count_progress() if is_watched else nullcontext() as report:
            if is_job(source):
                subject = _load_job(source, set_ or [], batches, (model, weights, tokens))
            else:
                subject = load_subject(source, require_model(model), weights, tokens, batches, set_ or [])
            found = audit_subject(*subject, share, cast(Any, of), confirm, report, goal)
        if rank:
            return
        if html is not None:
            from zerodrift.inspect.audit import audit_page

            write_page(html, audit_page(found))
        streams.emit(audit_json(found) if json else found.text(**streams.layout(80)))


def _parse_share(text: str) -> float:
    """Parse a share: `1%` or `0.01`."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError("--budget", "must be a share such as 1% or 0.01", got=repr(text))
    return value


def _load_job(
    source: str, overrides: list[str], count: int, others: tuple[Any, ...]
) -> tuple[Plan, Subject, list[Batch]]:
    from zerodrift.train import job_to_audit, read_job

    if any(option is not None for option in others):
        must = "must be left out with a job, which names its model and data"
        do = "Override the job's: `--set model.source=...`."
        raise ConfigError("--model, --weights, --data", must, got="one of them", do=do)
    return job_to_audit(*read_job(source, overrides), count)
