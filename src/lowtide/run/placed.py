"""Have operations write kept values right into their places in the slab.

An intercepted operation runs below autograd, where it may be given the memory for its results. Each gets a storage of its own over its place, as what
comes back does (`lowtide.store.slab`), so nobody sees a difference, and nothing is written over that somebody still holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowtide import private
from lowtide.into import Geometry, Into, Unknown, form_of, into_of, overload
from lowtide.plan.plan import Plan
from lowtide.run.direct import Director, PlanDirector
from lowtide.run.tape import is_unrecorded
from lowtide.store.stores import Stores

Call = Callable[[Any, tuple[Any, ...], dict[str, Any], bool], Any]


def _plainly(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


class Placer:
    """What the steps under one plan write into its slab.

    Args:
        plan: has places.
        stores: have the slab and count what could not be written there.
        device: where it is.

    Attributes:
        replays: whether the plan gives anything up; else autograd may save what it likes without being asked.
    """

    def __init__(self, plan: Plan, stores: Stores, device: torch.device) -> None:
        assert stores.slab is not None
        self.replays = any(step.replayed for step in plan.program)
        self._slab = stores.slab
        self._device = stores.slab.memory.device
        self._stores = stores
        self._steps: dict[int, tuple[Any, Into, dict[int, tuple[int, int]]]] = {}
        for place in plan.places:
            func = overload(plan.program[place.step].name)
            into = into_of(func, device.type) if func is not None else None
            if into is None:  # the plan was made by another PyTorch
                stores.unplaced += 1
                continue
            self._steps.setdefault(place.step, (func, into, {}))[2][place.output] = (place.start, place.bytes)

    def places(self, director: Director, func: Any) -> bool:
        """Whether ``func``, if it is the plan's next operation, writes into the slab."""
        step = self._steps.get(director.at) if isinstance(director, PlanDirector) else None
        return step is not None and step[0] is func

    def around(self, director: PlanDirector, call: Call) -> Call:
        """``call``, with the results of the plan's operations in their places."""
        steps = self._steps

        def placing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], plain: bool = False) -> Any:
            step = steps.get(director.at)
            if step is None or step[0] is not func or private.in_backward() or is_unrecorded():
                return call(func, args, kwargs, plain)
            _, into, places = step
            looks = self._looks(into, args, kwargs)
            memory = self._memory(looks, places) if looks is not None else None
            if memory is None:
                self._stores.unplaced += len(places)
                return call(func, args, kwargs, plain)
            return into.run(args, kwargs, memory, _plainly if plain else private.call)

        return placing

    def _looks(self, into: Into, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Geometry, ...] | None:
        """What the results of a call look like, worked out once for calls of one form."""
        try:
            form = (into.func, form_of(args, kwargs, self._device))
        except Unknown:
            return None
        known = self._stores.looks
        if form not in known:
            known[form] = into.looks(args, kwargs)
        return known[form]

    def _memory(self, looks: tuple[Geometry, ...], places: dict[int, tuple[int, int]]) -> list[torch.Tensor] | None:
        """Memory for every result, or ``None`` where no place is free."""
        memory: list[torch.Tensor] = []
        placed = 0
        for output, look in enumerate(looks):
            start, bytes_ = places.get(output, (0, -1))
            tensor = self._slab.tensor(start, look) if bytes_ == look.bytes else None
            if tensor is not None:
                placed += 1
            elif placed or len(looks) > 1:
                tensor = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=self._device)
            else:
                return None
            memory.append(tensor)
        if not placed:
            return None
        self._stores.unplaced += len(places) - placed
        return memory
