"""On PYTHONPATH of what is tried without a GPU: `accelerate` then takes ranks on CPUs for ranks.

Under DeepSpeed it asks the GPU which collectives there are; without one, every rank believes that it is the
first of one. Nothing else is changed.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from typing import Any


class _Finder:
    """Looks after `accelerate.state` when that is imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name != "accelerate.state":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_tell(module: Any) -> None:
                run(module)
                ask = module.PartialState._prepare_backend

                def backend(self: Any, *args: Any, **kwargs: Any) -> Any:
                    found, kind = ask(self, *args, **kwargs)
                    return found or ("gloo" if "LOCAL_RANK" in os.environ else None), kind

                module.PartialState._prepare_backend = backend

            spec.loader.exec_module = run_and_tell  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
