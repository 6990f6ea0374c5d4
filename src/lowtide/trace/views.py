"""Views whose storage is written in place after they were taken: give them the history on fake tensors that real ones have.

Autograd makes the history of such a view anew when it is next used. On real tensors that is `torch.as_strided` of the view's base, the backward
of which fills a gradient of the base's size. On fake tensors it is the chain of views by which it was taken, and the backward of most takes
no memory. So, while a trace on fake tensors runs, `FreshViews` hands every function the strided view in place of the stale one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide.errors import TraceError
from lowtide.ops import tensors_of

_TAKEN = "_lowtide_taken"
_FRESH = "_lowtide_fresh"


def taken(result: Any, args: tuple[Any, ...]) -> Any:
    """The views that were just taken of the first of ``args``, with a note of which version they are of."""
    source = next(tensors_of(args), None)
    if source is not None and not source.is_inference():
        for view in tensors_of(result):
            setattr(view, _TAKEN, source._version)
    return result


def is_stale(tensor: torch.Tensor) -> bool:
    """Whether a view that autograd follows was taken before the latest write to its storage."""
    return tensor._is_view() and tensor.requires_grad and tensor._version != getattr(tensor, _TAKEN, 0)


def refuse_stale(inputs: list[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
    """A stale view was used where no function mode sees it: in the middle of a function that is written in C++ or in PyTorch's own Python.

    Raises:
        TraceError: one is among the ``inputs``, otherwise than to be ``written``.
    """
    found = [id(tensor) for tensor in inputs if is_stale(tensor)]
    for number in {id(tensor) for tensor in written}.intersection(found):
        found.remove(number)
    if found:
        raise TraceError("the step writes in place below a view, the backward of which fake tensors do not show: trace with real=True")


class FreshViews(TorchFunctionMode):
    """Hands functions the view that real tensors would have in place of a stale one.

    Args:
        written: says whether anything has been written in place so far.
    """

    def __init__(self, written: Callable[[], bool]) -> None:
        super().__init__()
        self._written = written

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``func`` with fresh views; what it writes in place stays the tensor that it was given.

        Backward takes nodes in the order in which they were made, the latest first. A view that is itself written gets its new history at
        once, another one when it is next used.
        """
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        writes = (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or kwargs.get("inplace") is True
        given = args
        if self._written():
            first = args[:1] if writes or name in ("__set__", "__setitem__") else tuple(map(_fresh, args[:1]))
            kwargs = {key: item if key == "out" else _fresh(item) for key, item in kwargs.items()}
            args = (*first, *map(_fresh, args[1:]))
        result = func(*args, **kwargs)
        if writes and given and isinstance(given[0], torch.Tensor) and self._written():
            _fresh(given[0])
        return result


def _fresh(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return _fresh_view(item) if is_stale(item) else item
    if type(item) in (list, tuple) and any(isinstance(part, (torch.Tensor, list, tuple)) for part in item):
        return type(item)(map(_fresh, item))
    return item


def _fresh_view(view: torch.Tensor) -> torch.Tensor:
    """The strided view of the base that autograd puts in the place of a stale one: one for all uses until the next write."""
    found = getattr(view, _FRESH, None)
    if found is None or is_stale(found):
        base = view._base
        assert base is not None
        found = base.as_strided(view.shape, view.stride(), view.storage_offset())
        setattr(view, _FRESH, found)  # lives as long as the view, which holds the storage anyway
    return found
