"""Replay random operations exactly, even while other threads draw.

All threads of a process share PyTorch's default generator. A thread that reads its state, draws, and later
sets that state to draw again would disturb others that draw in between (one that loads data, say), and be
disturbed by them. So on the CPU an operation that may run again draws from a generator of its own thread,
which begins at the shared generator's state; then the shared one is set to where the own one ends, so that
the numbers are those of the plain step. If another thread has drawn meanwhile, the shared one stays as it is,
and an operation that only fills a tensor draws again, with a seed drawn from the shared one. A replay uses
the own generator alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import compress, tee
from operator import eq, methodcaller
from typing import Any

import torch

from lowtide import private
from lowtide.ops import Call
from lowtide.run.record.tape import Node
from lowtide.trace.untouched import generator_state, set_generator_state

Run = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Own(threading.local):
    def __init__(self) -> None:
        self.generator = torch.Generator()


_OWN = _Own()


@functools.cache
def taking_generator(func: Any) -> tuple[Any, int]:
    """The overload of a random operation that also takes a generator, or ``None``, and the generator's
    position.
    """
    if not isinstance(func, private.OpOverload):
        return None, 0
    wanted = [(a.name, str(a.type)) for a in private.schema_of(func).arguments if a.name != "generator"]
    for other in private.similar_overloads(func):
        arguments = private.schema_of(other).arguments
        places = [place for place, a in enumerate(arguments) if a.name == "generator"]
        if places and [(a.name, str(a.type)) for a in arguments if a.name != "generator"] == wanted:
            return other, places[0]
    return None, 0


def _with(
    generator: torch.Generator, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if position < len(args):
        return (*args[:position], generator, *args[position + 1 :]), kwargs
    return args, {**kwargs, "generator": generator}


_STATE, _NUMPY, _BYTES = methodcaller("get_state"), methodcaller("numpy"), methodcaller("tobytes")


def _went_on(generator: torch.Generator, before: bytes, after: torch.Tensor) -> bool:
    """Set a generator's state to ``after`` if it is ``before``; return whether it was.

    All of it runs inside built-in iterators, between which Python does not switch threads: a thread that drew
    in between would have its numbers drawn a second time. The compared state is kept until the end, since
    freeing a tensor may switch threads, too.
    """
    states, _held = tee(map(_STATE, (generator,)))
    arrays, _held_too = tee(map(_NUMPY, states))
    now = map(_BYTES, arrays)
    return bool(list(map(generator.set_state, compress((after,), map(eq, now, (before,))))))


def drawn(node: Node, run: Run, call: Call) -> Any:
    """Run a random operation in the forward, and record the state that it draws from.

    Args:
        node: the operation as it is recorded.
        run: runs an operation.
        call: the call; one that only fills a tensor may run a second time.
    """
    args, kwargs = call.args, call.kwargs
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
    node.generator = given[0] if given else None
    node.noted = generator_state(node.device, node.generator)
    func, position = taking_generator(node.func)
    if func is None or node.device.type != "cpu":
        return run(node.func, args, kwargs)
    own, shared = _OWN.generator, node.generator or torch.default_generator
    set_generator_state(node.device, own, node.noted)
    args, kwargs = _with(own, position, args, kwargs)
    result = run(func, args, kwargs)
    if not _went_on(shared, node.noted, own.get_state()) and call.info.fills:
        own.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=shared)))
        node.noted = generator_state(node.device, own)
        result = run(func, args, kwargs)
    return result


def drawn_again(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operation again from its recorded state; the shared generator is left unchanged."""
    assert node.noted is not None
    func, position = taking_generator(node.func)
    if func is not None and node.device.type == "cpu":
        set_generator_state(node.device, _OWN.generator, node.noted)
        args, kwargs = _with(_OWN.generator, position, args, kwargs)
        return func(*args, **kwargs)
    before = generator_state(node.device, node.generator)
    set_generator_state(node.device, node.generator, node.noted)
    try:
        return node.func(*args, **kwargs)
    finally:
        set_generator_state(node.device, node.generator, before)
