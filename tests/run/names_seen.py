"""An interceptor that notes the names of the operations that it sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowtide.interception import (
    Interceptor,
    proceed,
)


class Names(Interceptor):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.names.append(str(func))
        return proceed(func, args, kwargs)

    @property
    def short(self) -> list[str]:
        """The names without namespace and overload."""
        return [name.split(".")[1] for name in self.names]


def names_of(run: Callable[[], Any]) -> list[str]:
    with Names() as names:
        run()
    return names.short
