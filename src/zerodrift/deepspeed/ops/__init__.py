"""`deepspeed.ops`: the optimizers that scripts build by hand. Everything else of it is absent."""

from __future__ import annotations

from typing import Any

from zerodrift.deepspeed import absent
from zerodrift.deepspeed.ops import adam, lion

__all__ = ["adam", "lion"]

_ABSENT = absent.absent(
    "deepspeed.ops",
    {
        "lamb": "LAMB needs whole parameters. Use AdamW or Lion.",
        "adagrad": "Use `torch.optim.Adagrad` without ZeRO, or AdamW.",
        "transformer": "The model runs as it is; there is no kernel injection.",
        "sparse_attention": "Attention is the model's own.",
        "fp_quantizer": "Weights are not quantized.",
        "DeepSpeedTransformerLayer": "The model runs as it is; there is no kernel injection.",
        "DeepSpeedTransformerConfig": "The model runs as it is; there is no kernel injection.",
    },
)


def __getattr__(name: str) -> Any:
    return absent.missing(__name__, name, __all__, _ABSENT)
