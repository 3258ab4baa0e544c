"""The verb over two sides of one model: `drift`.

Invariant: exit code 0 is within the bar with every tensor as trained, 3 is not, 2 is nothing to compare.
"""

from __future__ import annotations

import typer

from zerodrift.cli import options, streams
from zerodrift.cli.checking import NOT_AS_EXPECTED
from zerodrift.cli.planning import numbers


def drift(
    config: options.TrainerConfig,
    model: options.ModelOfTrainer,
    tokens: options.TokenFile,
    weights: options.TrainedWeights = None,
    sent: options.SentFolder = None,
    loaded: options.LoadedFolder = None,
    sampler: options.SamplerTable = None,
    recorded: options.RecordedFile = None,
    bar: options.Bar = 0.015,
    set_: options.Set = None,
    auto: options.Auto = None,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Compare a trainer with a sampler, and show which difference their drift comes from."""
    with streams.errors(debug):
        from zerodrift.inspect.audit.tokens import read_ids, read_recorded
        from zerodrift.inspect.drift.attribution import SamplerSide, compare_sides
        from zerodrift.inspect.drift.sampler_dtypes import read_sampler_dtypes
        from zerodrift.inspect.drift.text import comparison_json, comparison_text
        from zerodrift.inspect.drift.trainer import load_trainer

        sequences = read_ids(tokens)
        other = SamplerSide(
            sent,
            loaded,
            None if sampler is None else read_sampler_dtypes(sampler),
            None if recorded is None else read_recorded(recorded, sequences),
        )
        with streams.progress(f"replaying {model}"):
            side = load_trainer(config, model, weights, numbers(auto or ()), tuple(set_ or ()))
            found = compare_sides(side, other, sequences, bar)
        if json:
            streams.emit(comparison_json(found))
        else:
            there = [str(path) for path in (sent, loaded, sampler, recorded) if path is not None]
            count = sum(map(len, sequences))
            facts = [
                ("trainer", f"{config}, {weights or model}"),
                ("other side", ", ".join(there)),
                ("tokens", f"{count:,} in {len(sequences):,} sequences, {tokens}"),
            ]
            streams.emit(comparison_text(found, facts, color=streams.color()))
    if not found.within:
        raise typer.Exit(NOT_AS_EXPECTED)
