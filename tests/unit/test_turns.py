"""Two computations in turns: one at a time, in an order that no clock decides, with their own state."""

from __future__ import annotations

import contextvars
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zerodrift.experts.turns import Turns


def turns() -> Turns:
    return Turns(torch.device("cpu"), [torch.default_generator])


def computation(both: Turns, log: list[str], name: str, exchanges: int, pause: float) -> Callable[[], None]:
    """Return a function that computes, exchanges, computes, and so on."""

    def run() -> None:
        for number in range(exchanges):
            time.sleep(pause)
            log.append(f"{name}{number}")
            both.hand_over()
        log.append(f"{name}.")

    return run


@pytest.mark.parametrize(
    ("first", "second", "order"),
    [
        (3, 3, "B0 F0 B1 F1 B2 F2 B. F."),
        (2, 4, "B0 F0 B1 F1 B2 F. B3 B."),
        (4, 1, "B0 F0 B. F1 F2 F3 F."),
        (0, 0, "B. F."),
    ],
)
@pytest.mark.parametrize("pauses", [(0.003, 0.0), (0.0, 0.003)])
def test_the_order_follows_from_the_exchanges_alone(
    first: int, second: int, order: str, pauses: tuple[float, float]
) -> None:
    log: list[str] = []
    both = turns()
    both.run(computation(both, log, "F", first, pauses[0]), computation(both, log, "B", second, pauses[1]))
    assert log == order.split()


@pytest.mark.parametrize("who", ["F", "B"])
def test_an_error_of_one_ends_the_other_where_it_waits_and_is_the_only_one(who: str) -> None:
    both, left = turns(), []

    def run(name: str) -> Callable[[], None]:
        def inside() -> None:
            try:
                for number in range(3):
                    if name == who and number == 2:
                        raise KeyError(who)
                    try:
                        both.hand_over()
                    except Exception as error:  # as a model's own code may
                        raise AssertionError("caught") from error
            finally:
                left.append(name)

        return inside

    for _ in range(2):  # and the next pair begins anew
        with pytest.raises(KeyError, match=who):
            both.run(run("F"), run("B"))
    assert sorted(left) == ["B", "B", "F", "F"]


def test_an_interrupt_ends_both() -> None:
    """The interrupt comes to the thread of the first, which waits."""
    both, ended = turns(), []

    def second() -> None:
        both.hand_over()
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(0.02)
            both.hand_over()
            both.hand_over()
            ended.append("goes on")
        finally:
            ended.append("ends")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell may have it ignore
    try:
        with pytest.raises(KeyboardInterrupt):
            both.run(both.hand_over, second)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["ends"]


class Operations(TorchDispatchMode):
    """Counts one of torch's operations."""

    def __init__(self, operation: Any) -> None:
        super().__init__()
        self.operation, self.seen = operation, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is self.operation
        return func(*args, **(kwargs or {}))


def test_what_belongs_to_a_thread_goes_with_the_second() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="")
    found: list[Any] = []

    def look() -> None:
        one = torch.ones(2, 2)
        torch.add(one, one)
        product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        found.append((variable.get(), torch.is_grad_enabled(), product.dtype, one.device.type))

    variable.set("set")
    operations = Operations(torch.ops.aten.add.Tensor)
    with operations, torch.no_grad(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        turns().run(look, look)
    assert found == [("set", False, torch.bfloat16, "meta")] * 2
    assert operations.seen == 2


def test_a_cast_of_a_weight_is_kept_until_both_have_ended() -> None:
    """Autocast drops its cached casts where its outermost context ends on a thread; then a reused weight
    is cast again, and its gradient is two sums."""
    both, weight = turns(), torch.ones(2, 2, requires_grad=True)
    casts = Operations(torch.ops.aten._to_copy.default)

    def forward() -> None:
        with torch.autocast("cpu", torch.bfloat16), casts:
            weight @ weight
            both.hand_over()
            weight @ weight

    def backward() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            torch.ones(2, 2) @ torch.ones(2, 2)

    both.run(forward, backward)
    assert casts.seen == 1
