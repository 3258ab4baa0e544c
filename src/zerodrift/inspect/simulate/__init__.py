"""Simulate a step on machines that a file describes, without running anything there."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.inspect.simulate.cluster import built_in, read_cluster
    from zerodrift.inspect.simulate.simulation import (
        Plans, fewest_ranks, own_choice, require_known_order, simulate, sweep,
    )  # fmt: skip
    from zerodrift.inspect.simulate.text import simulation_json, simulation_text, sweep_json, sweep_text
    from zerodrift.inspect.simulate.work import count_work, sized_inputs

__getattr__, __dir__, __all__ = face(__name__)
