"""Interceptors that see a thread's operations."""

from __future__ import annotations

from typing import Any

from lowtide import interception


def test_what_stops_while_others_run_alone_stays_stopped() -> None:
    """As an abandoned profile does that is found to be garbage."""

    class Sees(interception.Interceptor):
        def operation(self, func: Any, args: Any, kwargs: Any) -> Any:
            return interception.proceed(func, args, kwargs)

    one, other = Sees(), Sees()
    with one:
        other.start()
        with interception.alone():
            other.stop()
        assert interception.interceptors() == [one]
    assert interception.interceptors() == []
