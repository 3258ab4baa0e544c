"""The store that ranks meet in, by a launcher's MASTER_ADDR and MASTER_PORT.

If the address is this machine's own (127.0.0.1, localhost), the store and gloo listen on that address only.
If it names a host, both listen where torch makes them.

Invariant: the values that a rank reads in the store were written by a rank of the same start.

[Note: restarts] An agent that restarts its ranks (`torchrun --max-restarts`) may keep its store, as with a
static rendezvous, and in it the addresses of the ranks that died. TORCHELASTIC_RESTART_COUNT does not
distinguish starts: agents of several hosts count by themselves. So every rank asks with a random number, and
rank 0 answers with a random name for the start; ranks that died ask no more.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import logging
import os
import socket
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from zerodrift.comm.watch import ranks_text
from zerodrift.errors import first_line

_log = logging.getLogger("zerodrift")

BUSY = 1.0
"""Seconds that rank 0 waits for its port to be free."""
PATIENCE = 30.0
"""Seconds until a rank says what it waits for."""
_PAUSE = 0.01
"""Seconds between two looks of rank 0 for ranks that ask."""


def meet(rank: int, world: int, timeout: timedelta) -> Any:
    """Return the store of this start. All ranks call it."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = loopback(host)
    if own:
        # gloo takes it from the environment alone.
        names = [name for _, name in socket.if_nameindex()]
        own_interface = next((name for name in ("lo", "lo0") if name in names), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", own_interface)
    missing = {0} if rank else set(range(1, world))

    def say() -> None:
        why = ""
        try:
            socket.getaddrinfo(host, port)
        except (OSError, ValueError):
            why = ", a name that this machine cannot resolve,"
        _log.warning(
            "zerodrift: rank %d waits for %s at MASTER_ADDR %r%s MASTER_PORT %d, and gives up after %g s",
            *(rank, ranks_text(sorted(missing)), host, why, port, timeout.total_seconds()),
        )

    waiting = threading.Timer(PATIENCE, say)  # a call of torch says nothing until it gives up
    waiting.daemon = True
    waiting.start()
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    begun = time.monotonic()
    try:
        while True:
            try:
                if hosts:
                    store = _listening(own or host, port, world, timeout, bool(own))
                else:
                    store = TCPStore(own or host, port, world, False, timeout, wait_for_workers=False)
                return PrefixStore(_name(store, rank, missing, timeout), store)
            except (RuntimeError, OSError) as error:
                # The store of an earlier engine may be about to go; one that stays will do.
                passed = time.monotonic() - begun
                if passed > timeout.total_seconds():
                    raise RuntimeError(first_line(error)) from error
                hosts = hosts and passed < BUSY
                gc.collect()
                time.sleep(10 * _PAUSE)
    finally:
        waiting.cancel()


def _listening(host: str, port: int, world: int, timeout: timedelta, own: bool) -> TCPStore:
    """Return a store that this process keeps, on all addresses of this machine or on its own alone."""
    if not own:
        return TCPStore(host, port, world, True, timeout, wait_for_workers=False)
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    held = listening.detach()
    return TCPStore(host, port, world, True, timeout, wait_for_workers=False, master_listen_fd=held)


def loopback(host: str) -> str:
    """Return the address of a host that only this machine can reach; "" if others can."""
    with contextlib.suppress(OSError, ValueError):
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        if addresses and all(ipaddress.ip_address(address).is_loopback for address in addresses):
            return min(addresses, key=lambda address: ":" in address)
    return ""


def _name(store: Any, rank: int, missing: set[int], timeout: timedelta) -> str:
    """Agree on a name for this start, see [Note: restarts]. Rank 0 takes who came out of `missing`."""
    mine = uuid.uuid4().hex
    if rank:
        store.set(f"zerodrift/asks/{rank}", mine)
        name: str = store.get(f"zerodrift/name/{mine}").decode()
        store.set(f"{name}/{rank}", "came")
        return name
    name, asked_by = f"zerodrift/start/{mine}", dict[int, str]()
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{name}/{other}"]):
                missing.discard(other)
            elif store.check([f"zerodrift/asks/{other}"]):
                asked = store.get(f"zerodrift/asks/{other}").decode()
                if asked_by.get(other) != asked:
                    store.set(f"zerodrift/name/{asked}", name)
                    asked_by[other] = asked
        if time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)[:8]} did not join")
        time.sleep(_PAUSE)
    return name
