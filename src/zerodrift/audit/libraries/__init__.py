"""One adapter per library: where it keeps what it has packed, in the versions it was tried with."""

from __future__ import annotations

from zerodrift.audit.adapter import Adapter


def adapters() -> tuple[Adapter, ...]:
    """One of each, for one watcher."""
    from zerodrift.audit.libraries.deepspeed import DeepSpeed
    from zerodrift.audit.libraries.fsdp1 import Fsdp1
    from zerodrift.audit.libraries.fsdp2 import Fsdp2
    from zerodrift.audit.libraries.own import Own

    return (Own(), Fsdp2(), Fsdp1(), DeepSpeed())
