"""Storages, aliases and version counters do what `lowtide.private.storages` says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide import private
from lowtide.interception import Interceptor, proceed


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.found: list[Any] = []
        self.look: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        if self.look is not None:
            self.found.append(self.look(args[0]))
        return func(*args, **(kwargs or {}))


def test_storage_key_is_of_the_storage() -> None:
    x = torch.ones(4)
    assert (
        private.storage_key(x)
        == private.storage_key(x[1:])
        == private.storage_key(x.view(2, 2))
        == private.storage_key(x.detach())
    )
    assert private.storage_key(x) != private.storage_key(x.clone())


def test_versioned_alias_shares_the_counter() -> None:
    x = torch.ones(4)
    alias = private.versioned_alias(x)
    assert (
        private.storage_key(alias) == private.storage_key(x)
        and alias.grad_fn is None
        and not alias.requires_grad
    )
    before = alias._version
    x.add_(1)
    assert alias._version == before + 1


def test_versioned_alias_shares_the_counter_inside_a_dispatch_mode() -> None:
    x = torch.ones(4)
    mode = Counts()
    mode.look = private.versioned_alias
    with mode:
        torch.sin(x)
    (alias,) = mode.found
    before = alias._version
    x[1:].mul_(2)
    assert alias._version > before
    with mode:
        x.zero_()
    assert alias._version > before + 1


def test_a_plain_detach_inside_a_dispatch_mode_does_not() -> None:
    """Why `versioned_alias` is there. If this fails, it can be made simpler."""
    x = torch.ones(4)
    mode = Counts()
    mode.look = torch.Tensor.detach
    with mode:
        torch.sin(x)
    before = mode.found[0]._version
    x.add_(1)
    assert mode.found[0]._version == before


def test_version_witness_tells_of_writes_and_holds_nothing() -> None:
    import weakref

    x = torch.ones(1000)
    storage = weakref.ref(x.untyped_storage())
    witness = private.version_witness(x)
    before = witness._version
    assert witness.untyped_storage().nbytes() == 0
    x[3] = 5.0
    assert witness._version == before + 1
    assert x[3] == 5.0 and x.numel() == 1000
    del x
    assert storage() is None


def test_storage_use_count() -> None:
    x = torch.ones(4)
    storage = x.untyped_storage()
    before = private.storage_use_count(storage)
    view = x[1:]
    assert private.storage_use_count(storage) == before + 1
    del view
    assert private.storage_use_count(storage) == before


def test_an_unseen_alias_is_not_dispatched() -> None:
    class Counting(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.calls += 1
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with Counting():
        alias = private.unseen_alias(y)
    assert Counting.calls == 0
    assert not alias.requires_grad and alias.data_ptr() == y.data_ptr()
    y.add_(1)
    assert alias._version == y._version


def test_a_borrowed_storage_holds_nothing() -> None:
    import weakref

    x = torch.arange(4.0)
    storage = weakref.ref(x.untyped_storage())
    other = private.borrowed_storage(x)
    assert (
        other.data_ptr() == x.data_ptr()
        and other.nbytes() == 16
        and other._cdata != x.untyped_storage()._cdata
    )
    again = torch.empty(0).set_(other)  # pyright: ignore
    assert private.lender_of(again.untyped_storage()) is x and private.lender_of(x.untyped_storage()) is None
    del x
    assert storage() is None and private.lender_of(other) is None


def test_storage_address_is_storage_key() -> None:
    x = torch.ones(4)
    assert private.storage_address(x.untyped_storage()) == private.storage_key(x)


def test_version_of_counts_writes() -> None:
    x = torch.ones(4)
    before = private.version(x)
    x.add_(1)
    x[1:].mul_(2)
    assert private.version(x) == before + 2


def test_nobody_sees_a_version_witness_made() -> None:
    class Sees(Interceptor):
        seen = 0

        def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            Sees.seen += 1
            return proceed(func, args, kwargs)

    x = torch.ones(4)
    with Sees():
        private.version_witness(x)
        assert Sees.seen == 0
        x + 1
        assert Sees.seen == 1


def test_base_of() -> None:
    x = torch.ones(4)
    assert all(private.base_of(tensor) is x for tensor in (x, x[1:], x.view(2, 2)[0]))


def test_is_zero_tensor() -> None:
    assert private.is_zero_tensor(torch._efficientzerotensor(3)) and not private.is_zero_tensor(
        torch.zeros(3)
    )


def test_conjugated_and_negated_are_views() -> None:
    x = torch.tensor([1 + 2j])
    conjugate, negative = private.conjugate_view(x), private.negative_view(x.imag)
    assert conjugate.is_conj() and conjugate.item() == 1 - 2j and negative.item() == -2
    assert private.storage_key(conjugate) == private.storage_key(negative) == private.storage_key(x)


def test_sparse_parts_of_what_is_not_coalesced() -> None:
    x = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (4,), check_invariants=True)
    indices, values = private.sparse_parts(x)
    assert private.stored_elements(x) == 2
    assert not x.is_coalesced() and indices.tolist() == [[1, 1]] and values.tolist() == [2.0, 3.0]


def test_a_wrapper_has_no_memory() -> None:
    class Wrapper(torch.Tensor):
        __torch_function__ = private.no_torch_function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0]

    made = private.wrapper_of(Wrapper, (2, 3), torch.float16, torch.device("cpu"), (1, 2))
    assert made.shape == (2, 3) and made.stride() == (1, 2) and made.dtype is torch.float16
    assert type(made) is Wrapper and made + 1 is made, "it answers itself"
    with pytest.raises(RuntimeError, match="invalid python storage"):
        made.untyped_storage().data_ptr()


def test_in_custom_backward_and_carried() -> None:
    found = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(weight)
            return x * weight

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            (weight,) = ctx.saved_tensors
            found.append((private.in_custom_backward(), vars(weight)))
            return grad * weight, None

    def unpack(packed: torch.Tensor) -> torch.Tensor:
        alias = packed.data
        alias.mark = 3  # type: ignore[attr-defined]
        return private.carrier_of(alias)

    x, weight = torch.ones(2, requires_grad=True), torch.full((2,), 5.0, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = Product.apply(x, weight)
    y.sum().backward()
    assert found == [(True, {"mark": 3})] and not private.in_custom_backward()
    assert x.grad is not None and x.grad.tolist() == [5.0, 5.0]


def test_version() -> None:
    tensor = torch.zeros(1).add_(1)
    with torch.inference_mode():
        made = torch.zeros(1).add_(1)
    assert (private.version(tensor), private.version(made)) == (1, 0)


def test_the_address_of_a_storage_leaves_a_lazy_clone_shared() -> None:
    x = torch.arange(8.0)
    other = torch.ops.aten._lazy_clone.default(x)
    assert private.knows_storage_data()
    assert private.storage_data(x) == private.storage_data(x[3:]) == private.storage_data(other)
    other.add_(1)
    assert private.storage_data(x) != private.storage_data(other)


def test_before_storage_resizes_tells_each_resize_in_python() -> None:
    told: list[tuple[int, int, int]] = []
    ends = private.before_storage_resizes(
        lambda storage, nbytes: told.append((private.storage_address(storage), storage.nbytes(), nbytes))
    )
    x = torch.ones(4)
    key = private.storage_key(x)
    x.untyped_storage().resize_(0)
    x.storage().resize_(2)  # a typed storage counts elements
    assert told == [(key, 16, 0), (key, 0, 8)]
    ends()
    x.untyped_storage().resize_(4)
    assert len(told) == 2 and x.untyped_storage().nbytes() == 4


def test_unshare_lets_a_storage_be_resized() -> None:
    x = torch.arange(8.0)
    clone = torch.ops.aten._lazy_clone.default(x)
    private.unshare(x.untyped_storage())
    x.untyped_storage().resize_(0)
    x.untyped_storage().resize_(32)
    x.zero_()  # fails inside PyTorch where the storage still counts as a lazy clone's
    assert clone.tolist() == list(range(8)) and not x.any()
