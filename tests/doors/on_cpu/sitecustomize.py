"""Patches for tools without a GPU, by PYTHONPATH: ranks on CPUs count as ranks, and nothing is compiled.

Under DeepSpeed `accelerate` asks the GPU which collectives there are; without one, every rank believes that
it is the first of one. For the ranks of one machine DeepSpeed has a sum through shared memory, which it would
compile for minutes; gloo's is taken. Nothing else is changed.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from typing import Any


def _ranks_are_ranks(state: Any) -> None:
    ask = state.PartialState._prepare_backend

    def backend(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, kind = ask(self, *args, **kwargs)
        return found or ("gloo" if "LOCAL_RANK" in os.environ else None), kind

    state.PartialState._prepare_backend = backend


def _nothing_is_compiled(torch: Any) -> None:
    torch.build_shm_op = lambda: None


_CHANGES = {"accelerate.state": _ranks_are_ranks, "deepspeed.comm.torch": _nothing_is_compiled}


class _Finder:
    """An import hook that patches these modules."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_change(module: Any) -> None:
                run(module)
                _CHANGES[name](module)

            spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
