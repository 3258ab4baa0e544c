"""An engine for verl: what its trainers ask of `fsdp` or `megatron`, done by zerodrift as a config says.

    python -m verl.trainer.sft_trainer engine=zerodrift engine.config=zero3.yaml ...

verl finds it by itself where zerodrift is installed. `groups.py` tells hydra, `config.py` has what a user
writes and what is refused, `model.py` makes the model, `engine.py` trains it, `weights.py` hands it to a
sampler with a digest of every tensor, and `checkpoints.py` saves it.

Invariant: nothing of verl decides a dtype.
"""

from importlib.metadata import version

from zerodrift.errors import Problem

TESTED = "0.9.1"

try:
    import verl
except ModuleNotFoundError as error:
    if error.name != "verl":
        raise
    absent = Problem(
        "zerodrift.verl",
        "must have `verl` beside it",
        got="no such package",
        do=f"Run `pip install verl=={TESTED}`.",
    )
    raise ImportError(str(absent), name="verl") from error

try:
    from zerodrift.verl.config import NAME, ZeroDriftEngineConfig, require_supported
    from zerodrift.verl.engine import ZeroDriftEngine, ZeroDriftValueEngine
    from zerodrift.verl.groups import register
    from zerodrift.verl.weights import digests_of, require_same
except ImportError as error:
    if not (error.name or "").startswith(verl.__name__):
        raise
    other = Problem(
        "verl", f"must have what {TESTED} has", got=f"{version('verl')}: {error}", do=f"Install {TESTED}."
    )
    raise ImportError(str(other), name=error.name) from error

register()

__all__ = [
    "NAME",
    "ZeroDriftEngine",
    "ZeroDriftEngineConfig",
    "ZeroDriftValueEngine",
    "digests_of",
    "require_same",
    "require_supported",
]
