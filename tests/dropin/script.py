"""The interface of a script: a package, a stage, data, and a record of reported values.

Invariant: a script does the same on every rank, on its own data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH = 6

STAGES = (0, 1, 2, 3)

CLOSE = 1e-6
"""Largest difference in fp32 that counts as equal, because sums are formed in another order."""


@dataclass
class Run:
    """One run of a script on one rank."""

    deepspeed: Any
    """The package: DeepSpeed, the drop-in, or plain torch."""
    stage: int
    folder: Path
    """Folder of all ranks."""
    told: dict[str, Any] = field(default_factory=dict)
    engines: list[Any] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def config(self, **rest: Any) -> dict[str, Any]:
        """Return a config of SGD in fp32; keys of `zero_optimization` are added to the stage's."""
        # DeepSpeed's persistent parameters race on gloo.
        zero = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        base = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        }
        return {**base, **rest, "zero_optimization": {**zero, **rest.get("zero_optimization", {})}}

    def engine(self, model: nn.Module, **config: Any) -> Any:
        """Make an engine; keywords that are no keys of a config are arguments of `initialize`."""
        names = {"optimizer", "lr_scheduler", "model_parameters"} & config.keys()
        arguments = {name: config.pop(name) for name in names}
        if isinstance(arguments.get("optimizer"), dict):
            config["optimizer"] = arguments.pop("optimizer")
        made = self.deepspeed.initialize(model=model, config=self.config(**config), **arguments)[0]
        self.engines.append(made)
        return made

    @property
    def is_plain(self) -> bool:
        """Return True under plain torch."""
        return hasattr(self.deepspeed, "plain")

    def end(self, engine: Any) -> None:
        """Destroy an engine before the others."""
        self.engines.remove(engine)
        engine.destroy()

    def data(self, seed: int, *shape: int) -> Tensor:
        source = torch.Generator().manual_seed(1000 * seed + self.rank)
        return torch.randn(shape or (4, WIDTH), generator=source)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of all parameters."""
        named = dict(model.named_parameters())
        with self.deepspeed.zero.GatheredParameters(list(named.values())):
            return {name: parameter.detach().clone() for name, parameter in named.items()}

    def train(
        self, engine: Any, steps: int = 3, first: int = 0, forward: Callable[..., Any] | None = None
    ) -> None:
        """Train some steps on different batches and report the losses."""
        for step in range(first, first + steps):
            loss = square((forward or engine)(self.data(step)))
            engine.backward(loss)
            engine.step()
            self.tell(f"loss {step}", loss)

    def tell(self, name: str, value: Any) -> None:
        """Report a value that must be equal under every package."""
        while name in self.told:
            name += "'"
        self.told[name] = kept(value)

    def finish(self) -> None:
        for number, engine in enumerate(self.engines):
            self.tell(f"weights {number}", self.weights(engine.module))
            engine.destroy()
        self.engines.clear()


@dataclass(frozen=True)
class Script:
    """A script with the stages at which DeepSpeed agrees with plain torch."""

    run: Callable[[Run], None]
    stages: tuple[int, ...] = STAGES
    """Stages at which it runs."""
    alike: tuple[int, ...] = STAGES
    """Stages at which DeepSpeed agrees with plain torch."""
    why: str = ""
    """DeepSpeed's behaviour at other stages."""
    own: bool = False
    """Whether the script asserts its results itself, because plain torch lacks a name that it uses."""
    close: float = CLOSE
    """Largest admitted difference between DeepSpeed and the drop-in."""

    @property
    def name(self) -> str:
        return self.run.__name__


def square(output: Any) -> Tensor:
    return output.float().square().mean()


def kept(value: Any) -> Any:
    """Return a copy of the value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: kept(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [kept(item) for item in value]
    return value


def apart(mine: Any, theirs: Any, where: str = "", most: float = CLOSE) -> list[str]:
    """List the differences between two reports; only floats may differ, by at most `most`."""
    if isinstance(theirs, dict) and isinstance(mine, dict) and mine.keys() == theirs.keys():
        return [found for key in theirs for found in apart(mine[key], theirs[key], f"{where} {key}", most)]
    if isinstance(theirs, list) and isinstance(mine, list) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return [found for number, (a, b) in pairs for found in apart(a, b, f"{where}[{number}]", most)]
    if isinstance(theirs, Tensor) and isinstance(mine, Tensor) and mine.shape == theirs.shape:
        mine, theirs = mine.double(), theirs.double()
        most *= max(1.0, theirs.abs().max().item() if theirs.numel() else 0.0)
        worst = (mine - theirs).abs().max().item() if theirs.numel() else 0.0
        return [] if worst <= most else [f"{where}: off by {worst:.3g}, at most {most:.3g}"]
    if isinstance(theirs, float) and isinstance(mine, float):  # relative, and absolute near zero
        return [] if abs(mine - theirs) <= most * max(1.0, abs(theirs)) else [f"{where}: {mine} for {theirs}"]
    return [] if mine == theirs else [f"{where}: {mine!r} for {theirs!r}"]
