"""Storages and the tensors over them: addresses, aliases, version counters, views, subclasses.

Seen in PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from lowtide.private.dispatch import INPLACE_OR_VIEW, dispatch_key, include_key, is_key_included

_FAKE = dispatch_key("Fake")

storage_address: Any = attrgetter("_cdata")
"""The address of a storage object: unique while the storage lives, reused after."""


storage_key: Callable[[torch.Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
"""The address of the tensor's storage object: unique while the storage lives, reused after. No Python object
is made for it.
"""


def knows_storage_data() -> bool:
    """Whether `storage_data` can be asked."""
    return hasattr(torch._C, "_data_address")


def storage_data(tensor: torch.Tensor) -> int:
    """The address of the first byte of the tensor's storage, to be read only: the bytes of a lazy clone stay
    shared.
    """
    address: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return address


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; tensors made in inference mode do not count that."""
    return 0 if tensor.is_inference() else tensor._version


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """How many references hold the storage, the Python object included."""
    return torch._C._storage_Use_Count(storage._cdata)


def borrowed_storage(owner: torch.Tensor) -> torch.UntypedStorage:
    """Another storage object over the bytes of a tensor, which does not keep them: whoever uses it has to
    keep ``owner``, too.
    """
    storage = owner.untyped_storage()
    place = storage.data_ptr(), storage.device, storage.nbytes()
    made: Any = torch._C._construct_storage_from_data_pointer(*place)
    made.lender = weakref.ref(owner)
    return made


def lender_of(storage: torch.UntypedStorage) -> torch.Tensor | None:
    """The tensor whose bytes a `borrowed_storage` shows; ``None`` of any other."""
    lender = getattr(storage, "lender", None)
    return lender() if lender is not None else None


_UNTYPED = torch.UntypedStorage
_RESIZE = _UNTYPED.resize_
_BEFORE_RESIZE: dict[object, Callable[[torch.UntypedStorage, int], None]] = {}


def _resize(self: torch.UntypedStorage, size: int) -> Any:
    for callback in tuple(_BEFORE_RESIZE.values()):
        callback(self, size)
    return _RESIZE(self, size)


def before_storage_resizes(callback: Callable[[torch.UntypedStorage, int], None]) -> Callable[[], Any]:
    """Call ``callback`` before Python resizes a storage, with the storage and its new size in bytes. The
    function that this returns ends the calls.

    ``storage.resize_`` is no operation, so no interceptor sees it. ``tensor.resize_`` is one, and makes no
    such call.
    """
    if _UNTYPED.resize_ is not _resize:
        _UNTYPED.resize_ = _resize  # pyright: ignore
    key = object()
    _BEFORE_RESIZE[key] = callback
    return partial(_BEFORE_RESIZE.pop, key, None)


def unshare(storage: torch.UntypedStorage) -> None:
    """Give a storage bytes of its own where it shares them with a lazy clone: PyTorch fails where one that
    shares them was resized and is written to.
    """
    storage.data_ptr()


def versioned_alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same storage that shares the version counter and has no autograd history; works below
    autograd, too.

    ``detach`` below autograd makes an alias with a version counter of its own, which later in-place writes
    would not move. Letting the ADInplaceOrView key in for the one call gives an alias that shares the
    counter.
    """
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(INPLACE_OR_VIEW)
    if not excluded:
        return unseen_alias(tensor)
    torch._C._dispatch_tls_set_dispatch_key_excluded(INPLACE_OR_VIEW, False)
    try:
        return unseen_alias(tensor)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(INPLACE_OR_VIEW, True)


def unseen_alias(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor.detach()`` that no dispatch mode sees, which saves a trip through Python."""
    with torch._C._DisableTorchDispatch():
        return tensor.detach()


def version_witness(tensor: torch.Tensor) -> torch.Tensor:
    """An empty tensor that shares the version counter of ``tensor`` but not its bytes.

    Setting ``.data`` swaps the storage and leaves the counter, so the witness tells of in-place writes
    without keeping anything alive. No interceptor sees the two operations that make it.
    """
    seen = is_key_included(_FAKE)
    if seen:
        include_key(_FAKE, False)
    try:
        with torch._C._DisableTorchDispatch():
            witness = tensor.detach()
            witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    finally:
        if seen:
            include_key(_FAKE, True)
    return witness


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that autograd takes this one for a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether the tensor stands for zeros that have no memory, as forward-mode differentiation makes them."""
    return tensor._is_zerotensor()


conjugate_view: Callable[[torch.Tensor], torch.Tensor] = torch._conj  # pyright: ignore
"""A view of the same bytes as their conjugate, whatever the tensor shows now."""

negative_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view  # pyright: ignore
"""A view of the same bytes as their negative."""


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and values of a sparse tensor in coordinates, coalesced or not."""
    return tensor._indices(), tensor._values()


def stored_elements(tensor: torch.Tensor) -> int:
    """How many elements a sparse tensor in coordinates holds; those at one place count each."""
    return tensor._nnz()


def wrapper_of(kind: type, shape: Any, dtype: torch.dtype, device: torch.device, strides: Any = None) -> Any:
    """A tensor of a subclass that has no memory of its own."""
    made: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return made(kind, shape, strides=strides, dtype=dtype, device=device)


def carrier_of(tensor: torch.Tensor) -> torch.Tensor:
    """What an unpack hook returns for autograd to hand out ``tensor`` itself, with its type and attributes.

    For tensors that require grad: of these autograd hands out a detached copy of what the hook returns, a
    plain tensor without attributes. A subclass that answers ``detach`` is asked for the copy.
    """
    made = wrapper_of(_Carrier, tensor.shape, tensor.dtype, tensor.device)
    made.carries = tensor
    return made


class _Carrier(torch.Tensor):
    """Answers ``detach`` with another tensor."""

    carries: torch.Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> torch.Tensor:
        return args[0].carries
