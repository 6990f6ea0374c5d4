"""The values of the integers and booleans of a step on fake tensors, which the step's Python may branch on.

In: the real tensors that fakes stand for, and each operation that runs on fakes. Out: the values of token
ids, positions, masks and lengths, and of what operations make of these alone. Values that come from
floating-point numbers are unknown, and so is everything larger than `LIMIT_BYTES`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lowtide import private
from lowtide.ops import Call, enter, has_plain_storage, tensors_of
from lowtide.trace.costs.specs import runnable

LIMIT_BYTES = 8 << 20
"""The largest storage whose values are known: a million token ids, but no mask of 4,096 by 4,096 tokens."""


class Contents:
    """Values of integer and boolean tensors beside their fakes. They are kept for each storage, so all views
    of it have them, and a write through one view is seen through the others.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[torch.UntypedStorage | None, Any]] = {}

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are known."""
        return self._values_of(tensor) is not None

    def show(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        """``tensor`` and all views of its storage have the values of a real tensor's storage, where these are
        integers or booleans.
        """
        if _is_small(real) and private.storage_key(tensor) not in self._held:
            with private.without_fake_mode():
                self._hold(tensor, real.untyped_storage().cpu().clone())

    def run(self, call: Call) -> Any:
        """What a call on fake tensors returns: the values of its results are known where those of its
        arguments are.
        """
        known = self._follow(call)
        if known and call.info.reads_values and not call.written:
            device = next((tensor.device for tensor in call.inputs), torch.device("cpu"))
            results = self._run(call)
            return private.tree_map_only(torch.Tensor, partial(self._fake, device=device), results)
        result = private.call(call.func, self._counted(call), call.kwargs)
        results = list(tensors_of(result))
        fresh = call.fresh(results)
        if known and all(map(_is_small, (*call.written, *(results[place] for place in fresh)))):
            values = list(tensors_of(self._run(call)))
            for place in fresh:
                self._note(results[place], values[place])
        else:
            for tensor in call.written:
                self._hold(tensor, None)
        return result

    def _follow(self, call: Call) -> bool:
        """Whether the values of a call's results follow from those of its arguments."""
        if not runnable(call.func) or call.others or call.reason or call.draws():
            return False
        return all(map(self.knows, call.inputs))

    def _run(self, call: Call) -> Any:
        """Run a call on values."""

        def on_cpu(item: Any) -> Any:
            if isinstance(item, torch.Tensor):
                return self._real(item)
            return torch.device("cpu") if isinstance(item, torch.device) else item

        with private.without_fake_mode():
            args, kwargs = private.tree_map(on_cpu, (call.args, call.kwargs))
            kwargs = {name: item for name, item in kwargs.items() if name != "pin_memory"}
            return private.call(call.func, args, kwargs)

    def _counted(self, call: Call) -> tuple[Any, ...]:
        """A call's arguments, with the places of elements for a mask that says which are taken: how many that
        are no fake kernel knows.
        """
        if call.info.name != "aten.index.Tensor":
            return call.args
        source, indices = call.args
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool or not self.knows(index):
                places.append(index)
                continue
            with private.without_fake_mode():
                places += self._real(index).nonzero().to(index.device).unbind(1)
        return source, places

    def _fake(self, real: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake of the values that an operation returned."""
        fake = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=device)
        self._note(fake, real)
        return fake

    def _note(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """``tensor``, alone on a new storage, has these values."""
        if _is_small(tensor):
            with private.without_fake_mode():
                self._hold(tensor, torch.UntypedStorage(tensor.untyped_storage().nbytes()))
                self._real(tensor).copy_(values)

    def _values_of(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        if not _is_small(tensor):
            return None
        key = private.storage_key(tensor)
        if key not in self._held and not isinstance(tensor, private.FakeTensor):
            self.show(tensor, tensor)
        return self._held[key][0] if key in self._held else None

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the CPU of the values of one that are known."""
        values, empty = self._values_of(tensor), torch.empty(0, dtype=tensor.dtype, device="cpu")
        assert values is not None
        return empty.set_(values, tensor.storage_offset(), tensor.shape, tensor.stride())

    def _hold(self, tensor: torch.Tensor, values: torch.UntypedStorage | None) -> None:
        enter(self._held, tensor.untyped_storage(), values)


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether the values of a tensor may be known."""
    if tensor.is_floating_point() or tensor.is_complex() or not has_plain_storage(tensor):
        return False
    return tensor.untyped_storage().nbytes() <= LIMIT_BYTES
