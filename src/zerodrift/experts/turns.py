"""Run two computations of one rank in turns: while one exchanges values with other ranks, the other computes.

A computation that has started an exchange hands the turn over. It gets the turn back when the other one has
started an exchange too, or has ended. So one of them computes at any time, and no clock decides the turns.

Invariant: ranks whose two computations make the same exchanges start all of them in the same order.

[Note: two threads] A forward and a backward stop inside a user's module and inside autograd, which only a
thread can do. The first runs on the caller's thread. The second gets Python's context variables, torch's
modes, autocast, the device and its stream; the states of random generators change with the turn. Autocast's
shared cache of cast weights is not emptied before both have ended. On CUDA autograd would run a backward on
the one thread of the device and hold it up there, so it runs on the calling thread, as on a CPU.

[Note: one error] The error of one computation ends the other where it waits for its turn, and is raised.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Computation = Callable[[], None]


class PairAborted(BaseException):
    """Ends a computation because of the error of the other."""


class Turns:
    """The turns of one engine."""

    def __init__(self, device: torch.device, generators: Sequence[torch.Generator]) -> None:
        self._device, self._generators = device, tuple(generators)
        self._pair: _Pair | None = None

    def run(self, first: Computation, second: Computation) -> None:
        """Run both, with the results of first, then second. The second starts, as a backward should: it comes
        to an exchange soon, while a forward computes first."""
        self._pair = _Pair(first, second, self._generators)
        try:
            self._pair.run(self._device)
        finally:
            self._pair = None

    def hand_over(self) -> None:
        """Let the other computation go on, if there is one, while an exchange is under way."""
        if self._pair is not None:
            self._pair.hand_over()


class _Pair:
    def __init__(
        self, first: Computation, second: Computation, generators: tuple[torch.Generator, ...]
    ) -> None:
        self._computations = (first, second)
        self._generators = generators
        self._thread = threading.get_ident()
        self._turn = (threading.Semaphore(0), threading.Semaphore(0))
        self._ended = [False, False]
        self._random = self._states()
        """States of the random generators when both have ended."""
        self._raised: BaseException | None = None

    def run(self, device: torch.device) -> None:
        def computed() -> None:
            try:
                self._computations[1]()
            finally:
                self._random = self._states()

        begun, second = self._random, _as_here(computed, device)

        def beside() -> None:
            self._turn[1].acquire()
            self._run(1, second)

        threading.Thread(target=beside, name="zerodrift-turn", daemon=True).start()
        try:
            self._turn[1].release()
            self._turn[0].acquire()
            self._put(begun)
            if self._raised is None:
                self._run(0, self._computations[0])
            self._wait()
        except BaseException as error:  # an interrupt
            self._raised = self._raised or error
            self._turn[1].release()
            self._wait()
        torch.clear_autocast_cache()
        self._put(self._random)
        if self._raised is not None:
            raise self._raised

    def _run(self, number: int, computation: Computation) -> None:
        try:
            computation()
        except PairAborted:
            pass
        except BaseException as error:
            self._raised = self._raised or error
        self._ended[number] = True
        self._turn[1 - number].release()

    def _wait(self) -> None:
        while not self._ended[1]:
            self._turn[0].acquire()

    def hand_over(self) -> None:
        own = int(threading.get_ident() != self._thread)
        if not self._ended[1 - own] and self._raised is None:
            random = self._states()
            self._turn[1 - own].release()
            self._turn[own].acquire()
            self._put(random)
        if self._raised is not None:
            raise PairAborted

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _put(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _as_here(run: Computation, device: torch.device) -> Computation:
    """Return `run` for another thread, in the context of this one. See [Note: two threads].

    The stacks of modes are private in torch (2.13 to 2.15).
    """
    context, gradients = contextvars.copy_context(), torch.is_grad_enabled()
    modes: list[Any] = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    for kind in {"cpu", device.type}:
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        modes.append(torch.autocast(kind, dtype, enabled, torch.is_autocast_cache_enabled()))
    if device.type != "cpu":
        modes += [torch.accelerator.device_index(device.index), torch.accelerator.current_stream(device)]

    def there() -> None:
        torch.autocast_increment_nesting()  # never back to none on that thread, where torch empties the store
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(torch.set_grad_enabled(gradients))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            run()

    return lambda: context.run(there)
