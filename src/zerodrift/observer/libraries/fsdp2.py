"""`fully_shard` of torch: groups of parameters that are gathered and reduced together.

Tried with torch 2.13 and 2.15. Private names: `FSDPParamGroup.unshard`, `post_backward` and `fsdp_params`,
and of each `sharded_param`, `unsharded_accumulated_grad`, `param_dtype` and `orig_dtype`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerodrift.observer.adapter import Adapter
from zerodrift.observer.lines import line_of_script
from zerodrift.observer.observed import name as word
from zerodrift.observer.parameter import WatchedParameter
from zerodrift.observer.watch import Watcher

_HOME = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_NEEDED = ("unshard", "post_backward")


class Fsdp2(Adapter):
    def begin(self, watcher: Watcher) -> None:
        def imported(module: Any) -> None:
            groups = module.FSDPParamGroup
            missing = [name for name in _NEEDED if not hasattr(groups, name)]
            if missing:
                watcher.process.notes.append(
                    f"This torch's fully_shard has no {', '.join(missing)}: its collectives are not seen. "
                    "It was tried with torch 2.13 and 2.15."
                )
                return
            for name in ("unshard", "wait_for_unshard"):
                watcher.patches.replace(groups, name, _within(watcher))
            watcher.patches.replace(groups, "post_backward", _reducing(watcher))

        watcher.when_imported(_HOME, imported)


def _members(watcher: Watcher, group: Any) -> list[tuple[Any, WatchedParameter]]:
    members = []
    for member in group.fsdp_params:
        for model in watcher.models:
            parameter = model.resting(member.sharded_param)
            if parameter is not None:
                members.append((member, parameter))
    return members


def _gathered(watcher: Watcher, group: Any) -> list[WatchedParameter]:
    """A group's parameters, each with what it is gathered in: several dtypes travel as bytes."""
    members = _members(watcher, group)
    for member, parameter in members:
        parameter.gather_word = word(member.param_dtype or member.orig_dtype)
    return [parameter for _, parameter in members]


def _within(watcher: Watcher) -> Callable[..., Any]:
    """Collectives inside are of this group's parameters."""

    def call(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        watcher.packed.append(watcher.safely(lambda: _gathered(watcher, group), []))
        try:
            return original(group, *args, **kwargs)
        finally:
            watcher.packed.pop()

    return call


def _reducing(watcher: Watcher) -> Callable[..., Any]:
    def call(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        none: list[tuple[Any, WatchedParameter]] = []
        members = watcher.safely(lambda: [m for m in _members(watcher, group) if m[1].seen.trained], none)
        watcher.packed.append([parameter for _, parameter in members])
        try:
            out = original(group, *args, **kwargs)
        finally:
            watcher.packed.pop()
        watcher.safely(lambda: _kept(members), None)
        return out

    return call


def _kept(members: Sequence[tuple[Any, WatchedParameter]]) -> None:
    """What waits for a reduction that comes later."""
    for member, parameter in members:
        kept = member.unsharded_accumulated_grad
        if kept is not None:
            line = line_of_script()
            parameter.seen.see("accumulate", word(kept.dtype), "a sum before it is reduced", "", line)
