"""An engine for verl: its trainers use zerodrift instead of `fsdp` or `megatron`.

    python -m verl.trainer.sft_trainer engine=zerodrift engine.config=zero3.yaml ...

verl finds the engine where zerodrift is installed. `config.py` has the user's block and refuses unsupported
settings, `engine.py` trains, and `model.py` builds the model, hands its weights to a sampler, and saves.

Invariant: no code of verl decides a dtype.
"""

from importlib.metadata import version

from zerodrift.errors import Problem

TESTED = "0.9.1"

try:
    import verl
except ModuleNotFoundError as error:
    if error.name != "verl":
        raise
    must, do = "must be installed with `verl`", f"Run `pip install verl=={TESTED}`."
    absent = Problem("zerodrift.verl", must, got="no such package", do=do)
    raise ImportError(str(absent), name="verl") from error

try:
    from zerodrift.verl.config import NAME, ZeroDriftEngineConfig, register, require_supported
    from zerodrift.verl.engine import ZeroDriftEngine, ZeroDriftValueEngine
    from zerodrift.verl.model import digests_of, require_same
except ImportError as error:
    if not (error.name or "").startswith(verl.__name__):
        raise
    got, do = f"{version('verl')}: {error}", f"Install {TESTED}."
    lacks = Problem("verl", f"must have the interface of {TESTED}", got=got, do=do)
    raise ImportError(str(lacks), name=error.name) from error

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
