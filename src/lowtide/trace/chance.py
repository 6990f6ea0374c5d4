"""Chance: a step that is only looked at leaves random state as it was, and shows the most that chance may let run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lowtide import private
from lowtide.ops import OpInfo

BY_CHANCE = "chance decides how much of it runs: this is the most that was found"
"""A note of a graph whose model left more out when its single random numbers were others."""

_ALL_ONES = 0xFFFFFFFF
_NEXT_ONES = 0x7FFFFFFF  # Python takes so many leading bits as a choice may need, and the next word where they are too many: never here
_SET_WORDS = 512  # of the 624 that a Mersenne Twister holds: the others are as they were, so that whoever draws until a number fits ends


@dataclass
class Chance:
    """What single numbers that a model draws at random are in one trace.

    Attributes:
        least: the least there can be, the greatest, or with ``None`` as they come.
        drew: whether there were any.
    """

    least: bool | None = False
    drew: bool = False

    def drawn(self, info: OpInfo, args: Sequence[Any], result: Any) -> Any:
        """What a call returns: the extreme number in place of one that was drawn alone."""
        if not draws_one(info, args):
            return result
        self.drew = True
        if self.least is None:
            return result
        with private.without_fake_mode():
            return result.fill_(0.0 if self.least else 1 - torch.finfo(result.dtype).eps / 2)  # from [0, 1)


def gpus_of(modules: Sequence[torch.nn.Module]) -> list[int]:
    """The GPUs on which the modules have parameters."""
    devices = {parameter.device for module in modules for parameter in module.parameters()}
    return sorted(device.index for device in devices if device.type == "cuda" and device.index is not None)


@contextmanager
def same_random(devices: Sequence[int] = (), modules: Sequence[torch.nn.Module] = (), chance: Chance | None = None) -> Iterator[None]:
    """Afterwards the random states of PyTorch, of NumPy and of Python are what they were: models draw masks and layers to leave out from all.

    Args:
        devices: the GPUs whose generators are put back, too.
        modules: so are the generators that these have as attributes.
        chance: the next numbers from Python and NumPy are as it says, and it is told whether any was drawn.

    Example:
        >>> import random
        >>> random.seed(1)
        >>> with same_random():
        ...     drawn = random.random()
        >>> drawn == random.random()
        True
    """
    generators = _generators(modules)
    before = [read() for read, _ in generators]
    if chance is not None and chance.least is not None:
        for (_, write), state in zip(generators, before, strict=True):
            write(_with_extreme(state, chance.least))
    began = [read() for read, _ in generators]
    try:
        with same_torch_random(devices):
            yield
    finally:
        for (read, write), start, state in zip(generators, began, before, strict=True):
            if chance is not None and not isinstance(state, torch.Tensor) and not _equal(read(), start):
                chance.drew = True
            write(state)


@contextmanager
def same_torch_random(devices: Sequence[int] = ()) -> Iterator[None]:
    """`torch.random.fork_rng` that holds no tensor meanwhile: the budget of a small step has no room for the five kilobytes of a state."""
    places = [None, *devices]
    states = [(torch.get_rng_state() if at is None else torch.cuda.get_rng_state(at)).numpy().tobytes() for at in places]
    try:
        yield
    finally:
        for at, state in zip(places, states, strict=True):
            tensor = torch.frombuffer(bytearray(state), dtype=torch.uint8)
            torch.set_rng_state(tensor) if at is None else torch.cuda.set_rng_state(tensor, at)


def _generators(modules: Sequence[torch.nn.Module]) -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to read and to write the state of each source of random numbers that a model may draw from, PyTorch's own apart."""
    found: dict[int, tuple[Callable[[], Any], Callable[[Any], object]]] = {
        0: (random.getstate, random.setstate),
        1: (lambda: np.random.get_state(legacy=False), np.random.set_state),
    }
    for module in (m for root in modules for m in root.modules()):
        for item in vars(module).values():
            if isinstance(item, random.Random) and not isinstance(item, random.SystemRandom):
                found[id(item)] = (item.getstate, item.setstate)
            elif isinstance(item, np.random.RandomState):
                found[id(item)] = (lambda item=item: item.get_state(legacy=False), item.set_state)
            elif isinstance(item, np.random.Generator):
                bits = item.bit_generator
                found[id(bits)] = (lambda bits=bits: bits.state, lambda state, bits=bits: setattr(bits, "state", state))
            elif isinstance(item, torch.Generator):
                found[id(item)] = (item.get_state, item.set_state)
    return list(found.values())


def _equal(a: Any, b: Any) -> bool:
    """Whether two states of one generator, tuples or dictionaries with an array inside, are the same."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else a == b


def _with_extreme(state: Any, least: bool) -> Any:
    """The state of a Mersenne Twister whose next numbers are the least or the greatest; of another generator the state as it is."""
    word = 0 if least else _untempered(_ALL_ONES)
    if isinstance(state, tuple) and len(state[1]) == 625:
        version, words, gauss = state
        second = 0 if least else _untempered(_NEXT_ONES)
        return version, (*[word, second] * (_SET_WORDS // 2), *words[_SET_WORDS:-1], 0), gauss
    if isinstance(state, dict) and state.get("bit_generator") == "MT19937":
        key = np.array(state["state"]["key"])
        key[:_SET_WORDS] = word
        return {**state, "state": {"key": key, "pos": 0}}
    return state


def _untempered(output: int) -> int:
    """The word of a Mersenne Twister's state that it hands out as ``output``.

    Source: Matsumoto and Nishimura, "Mersenne Twister" (1998), equations 2.2 to 2.5, undone last to first.
    """
    steps: list[Callable[[int], int]] = [
        lambda word: word >> 18,
        lambda word: (word << 15) & 0xEFC60000,
        lambda word: (word << 7) & 0x9D2C5680,
        lambda word: word >> 11,
    ]
    word = output
    for step in steps:
        mixed = word
        for _ in range(5):  # each round makes as many bits more right as the step shifts by, seven at least
            word = mixed ^ step(word)
    return word


def draws_one(info: OpInfo, args: Sequence[Any]) -> bool:
    """Whether the call draws a single number, as models do to decide whether a layer runs."""
    return info.name in ("aten.rand.default", "aten.rand.generator") and tuple(args[0]) in ((), (1,))
