"""Experts on several ranks: tokens travel to them and back, and another computes meanwhile."""

from typing import TYPE_CHECKING

from zerodrift.faces import face

if TYPE_CHECKING:
    from zerodrift.experts.dispatch import distribute_experts
    from zerodrift.experts.turns import PairAborted, Turns

__getattr__, __dir__, __all__ = face(__name__)
