"""One adapter per library: where it keeps what it has packed, in the versions it was tried with."""

from __future__ import annotations

from zerodrift.observer.adapter import Adapter


def adapters() -> tuple[Adapter, ...]:
    """One of each, for one watcher."""
    from zerodrift.observer.libraries.deepspeed import DeepSpeed
    from zerodrift.observer.libraries.fsdp1 import Fsdp1
    from zerodrift.observer.libraries.fsdp2 import Fsdp2
    from zerodrift.observer.libraries.own import Own

    return (Own(), Fsdp2(), Fsdp1(), DeepSpeed())
