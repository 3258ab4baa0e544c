"""Import everything that tests import, run a first step, and freeze it all for the garbage collector.

Only the server that forks ranks imports this.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import torch

import zerodrift

MODULES = (
    "torch",
    "torch._dynamo",  # what the first optimizer step imports
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "pytest",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "tests.numerics.runs",
    "tests.numerics.networks",
    "tests.models.architectures",
)

gc.disable()  # it would look through what is imported again and again
for module in MODULES:
    with contextlib.suppress(ImportError):  # the test that needs it says so
        importlib.import_module(module)
for found in pkgutil.walk_packages(zerodrift.__path__, "zerodrift."):
    if not found.name.endswith("__main__"):
        with contextlib.suppress(ImportError):
            importlib.import_module(found.name)


def step() -> None:
    """Run the engine's first step, which halves the time of a rank's own."""
    from tests.numerics.networks import GPT, batch
    from tests.numerics.runs import config, make

    random = torch.get_rng_state()
    engine = make(config(3, "bf16"), GPT(layers=1))
    engine.backward(engine(batch(0)))
    engine.step()
    engine.destroy()
    torch.set_rng_state(random)


torch.set_num_threads(1)
with contextlib.suppress(Exception):  # what is broken, tests say
    step()
gc.enable()
gc.collect()
gc.freeze()  # a rank that looked through all of it would copy the pages
