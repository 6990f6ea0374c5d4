"""Each thread has interceptors of its own, and threads of one backward share them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from names_seen import Names

from lowtide import private
from lowtide.interception import (
    _KEY,
    _STATE,
    _included,
    _thread,
    interceptors,
    suspended,
)


def seen() -> bool:
    """Whether operations of this thread come to our kernels."""
    return _included(_KEY)


def test_a_thread_sees_its_own_operations_only() -> None:
    found: dict[str, list[str]] = {}
    began, go = threading.Event(), threading.Event()

    def other() -> None:
        found["outside"] = [str(one) for one in interceptors()]
        with Names() as names:
            began.set()
            go.wait(10)
            torch.ones(2).cos()
        found["other"] = names.short

    thread = threading.Thread(target=other)
    with Names() as names:
        thread.start()
        began.wait(10)
        torch.ones(2).sin()
        go.set()
        thread.join()
        assert seen()
    assert found == {"outside": [], "other": ["ones", "cos"]} and names.short == ["ones", "sin"]


def test_two_threads_of_one_backward_are_seen_both() -> None:
    """Autograd has a thread for each device, and gives it the state of the thread that called backward: while
    one is in an operation the other's are seen, too, and each operation runs once.
    """

    class Slow(Names):
        """Stays in the operation that the first thread runs until the second has run its own."""

        def __init__(self) -> None:
            super().__init__()
            self.inside, self.other_ran = threading.Event(), threading.Event()

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if func is torch.ops.aten.sin.default:
                self.inside.set()
                assert self.other_ran.wait(10)
            return super().operation(func, args, kwargs)

    slow = Slow()
    x, found = torch.ones(3), []

    def device_thread(state: Any) -> None:
        private.set_thread_object(_STATE, state)
        private.include_key(_KEY, True)
        assert slow.inside.wait(10)
        found.append(x.cos())
        found.append(x * 2)
        slow.other_ran.set()

    with slow:
        other = threading.Thread(target=device_thread, args=(_thread(),))
        other.start()
        result = x.sin()
        other.join()
        after = x.tan()
    assert sorted(slow.short) == ["cos", "mul", "sin", "tan"]
    assert torch.equal(result, torch.ones(3).sin()) and torch.equal(after, torch.ones(3).tan())
    assert torch.equal(found[0], torch.ones(3).cos())


def test_what_stops_while_others_run_alone_stays_stopped() -> None:
    """As an abandoned profile does that is found to be garbage."""
    one, other = Names(), Names()
    with one:
        other.start()
        with suspended():
            other.stop()
        assert interceptors() == [one]
    assert interceptors() == []
