"""Operations whose replay is more than the same call: random numbers, writes, running statistics,
collectives. Where a step is verified, any operation runs a second time at once (`why_not_reproduced`).

Random operations draw the same numbers again, even while other threads draw. All threads of a process share
PyTorch's default generator. A thread that reads its state, draws, and later sets that state to draw again
would disturb others that draw in between (one that loads data, say), and be disturbed by them. So on the CPU
an operation that may run again draws from a generator of its own thread, which begins at the shared
generator's state; then the shared one is set to where the own one ends, so that the numbers are those of the
plain step. If another thread has drawn meanwhile, the shared one stays as it is, and an operation that only
fills a tensor draws again, with a seed drawn from the shared one. A replay uses the own generator alone.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import compress, tee
from operator import eq, methodcaller
from typing import Any, Literal

import torch

from lowtide import private
from lowtide.errors import PlanError, ReplayError
from lowtide.ops import Call, has_plain_storage, op_info
from lowtide.run.tensor_bytes import Geometry, same_bytes, words_of
from lowtide.trace.untouched import generator_state, set_generator_state


class Input:
    """A tensor argument: a place among the values that a node reads, and a geometry over that."""

    __slots__ = ("geometry", "place")

    def __init__(self, place: int, geometry: Geometry) -> None:
        self.place, self.geometry = place, geometry


class Overwrite:
    """A tensor argument that the operation overwrites: its geometry, the size of its storage, and the place
    of its old value among what the node reads; ``None`` where the old value does not matter.
    """

    __slots__ = ("extent", "geometry", "nbytes", "place")

    def __init__(self, place: int | None, tensor: torch.Tensor, extent: int) -> None:
        self.place, self.geometry, self.extent = place, Geometry(tensor), extent
        self.nbytes = tensor.untyped_storage().nbytes()


class Unread:
    """A tensor argument whose content does not matter: running statistics, which training does not read. A
    replay updates others in their place.
    """

    __slots__ = ("device", "dtype", "shape")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def made(self) -> torch.Tensor:
        """A tensor like it."""
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)


class SparseInput:
    """A sparse argument, kept by reference."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, private.version(tensor)

    def here(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ReplayError: it was overwritten since.
        """
        if private.version(self.tensor) != self.version:
            raise ReplayError(
                "a sparse tensor that a recomputation reads was modified by an in-place operation after the "
                "forward pass: write to a copy, or keep that region with lowtide.policies.keep_all"
            )
        return self.tensor


class SpecialCall:
    """A recorded call that C++ has Python run again (``Node::special`` of ``cpp/tape.h``).

    Attributes:
        func, args, kwargs: the call, with `Input`, `Overwrite`, `Unread` and `SparseInput` in place of
            tensors.
        device: where it ran.
        written: what it overwrites.
        positions: of the results on storages of their own, among the flat results.
        random_state: of an operation that draws random numbers, its generator's state before it ran, from
            which its replay draws; ``None`` of others.
        generator: the generator argument, if one was given.
    """

    __slots__ = (
        "args", "device", "func", "generator", "kwargs", "positions", "random_state", "written",
    )  # fmt: skip

    def __init__(self, func: Any, device: torch.device) -> None:
        self.func, self.device = func, device
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.written: list[Overwrite] = []
        self.positions: tuple[int, ...] = ()
        self.random_state: Any = None
        self.generator: torch.Generator | None = None

    @property
    def name(self) -> str:
        """The operation's name."""
        return str(self.func)

    def run(self, bases: list[torch.Tensor], sole_reader: list[bool]) -> list[torch.Tensor]:
        """Run the call again.

        Args:
            bases: a tensor on each value that it reads.
            sole_reader: of each, whether nobody else waits for it, so that its bytes may change.

        Returns:
            A tensor on each value that it wrote: results first, then what it overwrote.
        """
        overwritten: dict[int, torch.Tensor] = {}
        for one in self.written:  # the old value itself where nobody else reads it, else a copy
            if one.place is not None:
                base = bases[one.place] if sole_reader[one.place] else _copy_of_bytes(bases[one.place])
            else:
                base = torch.empty(one.nbytes, dtype=torch.uint8, device=self.device)
            overwritten[id(one)] = one.geometry.over(base.untyped_storage())
        args = [_argument(item, bases, overwritten) for item in self.args]
        kwargs = {name: _argument(item, bases, overwritten) for name, item in self.kwargs.items()}
        flat = flat_results(run_again(self, args, kwargs))
        return [flat[position] for position in self.positions] + [overwritten[id(w)] for w in self.written]


def _argument(item: Any, bases: list[torch.Tensor], overwritten: dict[int, torch.Tensor]) -> Any:
    """A recorded argument with tensors in place of references."""
    if isinstance(item, Input):
        return item.geometry.view(bases[item.place])
    if isinstance(item, Overwrite):
        return overwritten[id(item)]
    if isinstance(item, Unread):
        return item.made()
    if isinstance(item, SparseInput):
        return item.here()
    return [_argument(part, bases, overwritten) for part in item] if isinstance(item, list) else item


def _copy_of_bytes(base: torch.Tensor) -> torch.Tensor:
    return words_of(base, torch.uint8, base.untyped_storage().nbytes()).clone()


def flat_results(result: Any) -> list[Any]:
    """The results of an operation as a flat list."""
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in (item if isinstance(item, (tuple, list)) else (item,))]
    return [result]


def run_again(special: SpecialCall, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with its recorded random state, and restore the generator; wait for a collective."""
    if special.random_state is None:
        result = special.func(*args, **kwargs)
        under_way = op_info(special.func).collective and isinstance(result, torch.Tensor)  # a ring has ended
        return private.wait_for_collective(result) if under_way else result
    return _draw_again(special, tuple(args), kwargs)


Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Own(threading.local):
    def __init__(self) -> None:
        self.generator = torch.Generator()


_OWN = _Own()


@functools.cache
def with_generator(func: Any) -> tuple[Any, int]:
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


def _advance(generator: torch.Generator, before: bytes, after: torch.Tensor) -> bool:
    """Set a generator's state to ``after`` if it is ``before``; return whether it was.

    All of it runs inside built-in iterators, between which Python does not switch threads: a thread that drew
    in between would have its numbers drawn a second time. The compared state is kept until the end, since
    freeing a tensor may switch threads, too.
    """
    states, _held = tee(map(_STATE, (generator,)))
    arrays, _held_too = tee(map(_NUMPY, states))
    now = map(_BYTES, arrays)
    return bool(list(map(generator.set_state, compress((after,), map(eq, now, (before,))))))


def run_first(special: SpecialCall | None, run: Runner, call: Call) -> Any:
    """Run an operation in the forward, and note what `run_again` needs beside the arguments.

    Args:
        special: the call as it is recorded; ``None`` where it is not.
        run: runs an operation.
        call: the call.
    """
    if special is not None and call.draws():
        return _draw(special, run, call)
    return run(call.func, call.args, call.kwargs)


def _draw(special: SpecialCall, run: Runner, call: Call) -> Any:
    """Run a random operation in the forward, and record the state that it draws from.

    Args:
        special: the operation as it is recorded.
        run: runs an operation.
        call: the call; one that only fills a tensor may run a second time.
    """
    args, kwargs = call.args, call.kwargs
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
    special.generator = given[0] if given else None
    special.random_state = generator_state(special.device, special.generator)
    func, position = with_generator(special.func)
    if func is None or special.device.type != "cpu":
        return run(special.func, args, kwargs)
    own, shared = _OWN.generator, special.generator or torch.default_generator
    set_generator_state(special.device, own, special.random_state)
    args, kwargs = _with(own, position, args, kwargs)
    result = run(func, args, kwargs)
    if not _advance(shared, special.random_state, own.get_state()) and call.info.fills:
        own.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=shared)))
        special.random_state = generator_state(special.device, own)
        result = run(func, args, kwargs)
    return result


def _draw_again(special: SpecialCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operation again from its recorded state; the shared generator is left unchanged."""
    assert special.random_state is not None
    func, position = with_generator(special.func)
    if func is not None and special.device.type == "cpu":
        set_generator_state(special.device, _OWN.generator, special.random_state)
        args, kwargs = _with(_OWN.generator, position, args, kwargs)
        return func(*args, **kwargs)
    before = generator_state(special.device, special.generator)
    set_generator_state(special.device, special.generator, special.random_state)
    try:
        return special.func(*args, **kwargs)
    finally:
        set_generator_state(special.device, special.generator, before)


Verify = Literal["first", "always", "never"]


def check_verify(verify: str) -> None:
    """Raise a `PlanError` where this is no `Verify`."""
    if verify not in ("first", "always", "never"):
        raise PlanError(f"verify={verify!r} is not known: use 'first', 'always' or 'never'")


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout: a kernel may round differently in another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def why_not_reproduced(
    special: SpecialCall,
    call: Call,
    flat: list[Any],
    before: list[tuple[torch.Tensor, torch.Tensor]],
    around: Callable[[Callable[[], Any]], Any],
) -> str:
    """Why a second run of an operation differs from the first, or an empty text.

    Args:
        special: the recorded operation.
        call: the first run.
        flat: its results.
        before: each tensor that it overwrote, with a copy from before.
        around: makes the call of the second run, to measure it.
    """
    args, kwargs = list(call.args), call.kwargs
    try:
        if before:
            copies = {id(tensor): copy for tensor, copy in before}
            args, kwargs = private.tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
        with private.replaying():
            again = flat_results(around(lambda: run_again(special, args, kwargs)))
    except RuntimeError as error:
        return f"its second run raised {type(error).__name__}: {error}"
    results = [pair for at, pair in enumerate(zip(flat, again, strict=True)) if at not in call.loose]
    pairs = [(a, b) for a, b in results if isinstance(a, torch.Tensor)] + before
    for first, second in pairs:
        if has_plain_storage(first) and not same_bytes(first, second):
            return "a second run with equal inputs gave other bytes"
    return ""
