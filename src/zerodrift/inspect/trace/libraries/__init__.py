"""One adapter per library, which knows the tensors that the library packs in the versions that were tried."""

from __future__ import annotations

from zerodrift.inspect.trace.state import Adapter


def adapters() -> tuple[Adapter, ...]:
    """Return a new adapter of each library, for one watcher."""
    from zerodrift.inspect.trace.libraries.deepspeed import DeepSpeed
    from zerodrift.inspect.trace.libraries.fsdp import Fsdp1, Fsdp2
    from zerodrift.inspect.trace.libraries.own import Own

    return (Own(), Fsdp2(), Fsdp1(), DeepSpeed())
