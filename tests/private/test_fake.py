"""Fake tensors do what `lowtide.private.fake` says."""

from __future__ import annotations

import logging
from contextlib import nullcontext

import pytest
import torch

from lowtide import private


def test_fake_tensors_refuse_to_give_an_address() -> None:
    with private.fake_mode() as mode:
        fake = mode.from_tensor(torch.ones(4))
        made = torch.empty(3) + torch.ones(3)
    for tensor in (fake, made):
        with pytest.raises(RuntimeError, match=r"data pointer|data_ptr|access"):
            tensor.data_ptr()


def test_without_fake_mode() -> None:
    with private.fake_mode():
        assert type(torch.ones(2)) is not torch.Tensor
        with private.without_fake_mode():
            assert type(torch.ones(2)) is torch.Tensor


def test_fake_mode_takes_real_constants() -> None:
    constant = torch.ones(4)
    with private.fake_mode():
        assert (torch.empty(4) + constant).shape == (4,)


def test_a_fake_tensor_is_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert private.is_fake(torch.ones(1))
    assert not private.is_fake(torch.ones(1))


def test_the_storage_of_a_fake_is_of_the_meta_device_and_ends_with_it() -> None:
    import weakref

    mode = private.fake_mode()
    with mode:
        fakes = [
            torch.ones(2),
            torch.ones(2, device="cuda") if torch.cuda.is_available() else torch.ones(3),
            torch.ones(4)[1:],
        ]
    watches = [weakref.ref(fake.untyped_storage()) for fake in fakes]
    assert all(
        storage is not None and storage.device.type == "meta" for storage in (watch() for watch in watches)
    )
    del fakes
    assert all(watch() is None for watch in watches)


def test_is_fake_mode_active() -> None:
    assert not private.is_fake_mode_active()
    with private.fake_mode():
        assert private.is_fake_mode_active()
        with private.without_fake_mode():
            assert not private.is_fake_mode_active()


def test_a_fake_mode_makes_fakes() -> None:
    mode = private.fake_mode()
    assert isinstance(mode, private.FakeTensorMode)
    fake = mode.from_tensor(torch.ones(2))
    assert isinstance(fake, private.FakeTensor)
    with private.FakeTensorMode(), pytest.raises(private.DynamicOutputShapeException, match="nonzero"):
        torch.empty(2).nonzero()


def test_optimizers_choose_for_fakes_as_for_parameters() -> None:
    class Mine(torch.nn.Parameter):
        pass

    assert private.has_foreach(torch.nn.Parameter(torch.ones(1)))
    assert not private.has_foreach(Mine(torch.ones(1)))
    with private.fake_mode():
        fake = torch.ones(1)
    assert not private.has_foreach(fake)
    with private.foreach_takes_fakes():
        assert private.has_foreach(fake)
    assert not private.has_foreach(fake)


def test_pytorch_logs_no_operation_that_fails_on_fakes(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    for quiet in (True, False):
        caplog.clear()
        with private.without_fake_log() if quiet else nullcontext(), private.fake_mode():
            a, b = torch.ones(2, 3), torch.ones(2, 3)
            with pytest.raises(RuntimeError, match="same reduction dim"):
                a @ b
        assert bool(caplog.records) is not quiet
    log.removeHandler(caplog.handler)


def test_transformers_looks_at_what_has_values() -> None:
    pytest.importorskip("transformers")
    from transformers import masking_utils

    with private.fake_mode():
        known, unknown = torch.ones(2), torch.ones(2)
    with private.real_for_transformers(lambda tensor: tensor is known):
        assert not masking_utils.is_tracing(known)
        assert masking_utils.is_tracing(unknown)
    assert masking_utils.is_tracing(known)
