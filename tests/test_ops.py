"""Facts about operations are read off their schemas, and off tables where schemas say nothing."""

from __future__ import annotations

import gc

import pytest
import torch

from lowtide.ops import (
    Call,
    covers_storage,
    enter,
    has_plain_storage,
    op_info,
    operation_named,
    returns_views,
    tensors_of,
    written_tensors,
)
from lowtide.private import schema_of

aten = torch.ops.aten


def test_what_a_schema_says() -> None:
    add, into = op_info(aten.add.Tensor), op_info(aten.add_.Tensor)
    assert (add.written, into.written, into.returns_written) == ((), (0,), True)
    assert op_info(aten.add.out).written == ("out",) and op_info(aten.add.out).fills
    assert op_info(aten.copy_.default).fills and not into.fills
    assert op_info(aten.bernoulli_.float).random and not add.random
    assert op_info(aten.view.default).is_view and op_info(aten._unsafe_view.default).is_view
    assert not returns_views(schema_of(aten.clone.default)) and not returns_views(schema_of(aten.add_.Tensor))


def test_what_no_schema_says() -> None:
    norm = op_info(aten.native_batch_norm.default)
    assert norm.running_statistics == (3, 4) and norm.training_position == 5
    assert op_info(aten.empty_permuted.default).uninitialized
    assert "storage" in op_info(aten.set_.source_Tensor).reason


def test_a_batch_norm_updates_its_statistics_in_training_only() -> None:
    mean, variance = torch.zeros(3), torch.ones(3)
    for training in (True, False):
        args = (torch.ones(2, 3), None, None, mean, variance, training, 0.1, 1e-5)
        assert bool(Call(aten.native_batch_norm.default, args, {}).statistics) == training


def test_tensors_are_found_in_lists_and_by_name() -> None:
    x, y = torch.ones(2), torch.ones(2)
    assert [id(t) for t in tensors_of((x, [y, 3], {"out": x}))] == [id(x), id(y), id(x)]
    info = op_info(aten.add.out)
    assert [id(t) for t in written_tensors(info, (x, x), {"out": y})] == [id(y)]


@pytest.mark.parametrize(
    ("name", "found"), [("aten.gelu.default", True), ("aten.gelu", True), ("aten.no_such", False)]
)
def test_operations_have_names(name: str, found: bool) -> None:
    assert (operation_named(name) is not None) == found


def test_storages_that_are_plain() -> None:
    x = torch.ones(4, 4)
    assert has_plain_storage(x) and has_plain_storage(x.T)
    assert not has_plain_storage(x.to_sparse()) and not has_plain_storage(x.to("meta"))
    assert covers_storage(x) and not covers_storage(x[1:])


def test_an_entry_ends_with_its_storage() -> None:
    table, ended = {}, []
    x = torch.ones(4)
    enter(table, x.untyped_storage(), "entry", lambda: ended.append(True))
    assert [entry for entry, _ in table.values()] == ["entry"]
    del x
    gc.collect()
    assert table == {} and ended == [True]
