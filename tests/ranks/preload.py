"""What ranks are forked with: everything that tests import, once, and out of the garbage collector's way.

Imported by the server that forks ranks, never by a test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib

MODULES = (
    "torch",
    "torch._dynamo",  # what the first optimizer step imports
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "pytest",
    "zerodrift.api",
    "zerodrift.audit.observe",
    "zerodrift.backends.fsdp2",
    "zerodrift.deepspeed",
    "zerodrift.engine.engine",
    "zerodrift.io.checkpoint.checkpoints",
    "zerodrift.io.safetensors.export",
    "zerodrift.io.initial",
    "zerodrift.optim.fused",
    "zerodrift.pipeline.run",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "transformers.models.gpt_oss.modeling_gpt_oss",
    "tests.numerics.runs",
    "tests.numerics.networks",
    "tests.models.architectures",
)

for module in MODULES:
    with contextlib.suppress(ImportError):  # the test that needs it says so
        importlib.import_module(module)
gc.collect()
gc.freeze()  # a rank that looked through all of it would copy the pages
