"""What an engine was asked for under other names, for one release: every method says what to write."""

from __future__ import annotations

import abc
import warnings

import torch

from zerodrift.engine.parameter import ParameterHandle


def deprecated(what: str, instead: str, level: int = 3) -> None:
    """Warn the caller of the caller."""
    text = f"`{what}` is deprecated and goes with the next release. Write `{instead}`."
    warnings.warn(text, DeprecationWarning, stacklevel=level)


class FullValues(abc.ABC):
    """Replaced by `parameter`."""

    @abc.abstractmethod
    def parameter(self, name: str) -> ParameterHandle: ...

    def full_gradient(self, name: str) -> torch.Tensor:
        deprecated("full_gradient(name)", "engine.parameter(name).gradient")
        return self.parameter(name).gradient

    def full_master(self, name: str) -> torch.Tensor:
        deprecated("full_master(name)", "engine.parameter(name).master")
        return self.parameter(name).master

    def full_state(self, name: str) -> dict[str, torch.Tensor]:
        deprecated("full_state(name)", "engine.parameter(name).state")
        return dict(self.parameter(name).state)

    def set_full_gradient(self, name: str, value: torch.Tensor) -> None:
        deprecated("set_full_gradient(name, value)", "engine.parameter(name).gradient = value")
        self.parameter(name).gradient = value

    def set_full_master(self, name: str, value: torch.Tensor) -> None:
        deprecated("set_full_master(name, value)", "engine.parameter(name).master = value")
        self.parameter(name).master = value

    def set_full_state(self, name: str, key: str, value: torch.Tensor) -> None:
        deprecated("set_full_state(name, key, value)", "engine.parameter(name).state[key] = value")
        self.parameter(name).set_moment(key, value)
