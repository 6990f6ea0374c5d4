"""The governor evicts when memory is short, and nothing else changes: the traps of that, one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import nn

from lowtide.meter import peak
from lowtide.run.record.engine import engine, forms
from lowtide.run.record.recorder import Recorder

KIB = 1 << 10
pytestmark = needs_meter


@contextmanager
def governed(room_bytes: int) -> Iterator[tuple[Recorder, Any]]:
    """A step within so many bytes above those at its start: its recorder and its governor."""
    with peak(torch.device("cpu")) as meter:
        governor = engine().Governor(meter.live_source(), room_bytes, forms=forms("cpu"))
        recorder = Recorder(governor=governor)
        recorder.start()
        try:
            yield recorder, governor
        finally:
            recorder.stop()


class Net(nn.Module):
    """Plain operations, random ones, writes in place, running statistics and views."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        h = (torch.relu_(h.sin() + 1) + 1).mul_(2)
        left, right = self.drop(h).chunk(2, 1)
        h = torch.cat([left.cos(), right.exp()], 1)
        out = self.second(h.tanh())
        h.add_(1e-3)
        return (out + self.second(h.sin())).square().mean()


@pytest.mark.parametrize("room_bytes", [0, 16 * KIB, 1 << 30])
@pytest.mark.parametrize("check", [False, True], ids=["", "compared"])
def test_gradients_are_those_of_the_plain_step(room_bytes: int, check: bool) -> None:
    found = []
    for limited in (False, True):
        net, x = Net(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(2)
        if not limited:
            net(x).backward()
        else:
            with peak(torch.device("cpu")) as meter:
                governor = engine().Governor(meter.live_source(), room_bytes, forms=forms("cpu"))
                recorder = Recorder(governor=governor, check=check)
                with recorder.recording():
                    loss = net(x)
                loss.backward()
            # Python runs what is compared, and asks no governor
            assert check or bool(governor.evicted) is (room_bytes < KIB * KIB)
        found.append([p.grad for p in net.parameters()])
    assert all(map(torch.equal, *found))  # type: ignore[arg-type]


def chain(w: torch.Tensor, rounds: int = 16) -> torch.Tensor:
    """Each round saves its input: so many times the bytes of ``w``."""
    for _ in range(rounds):
        w = w.sin()
    return w


def test_a_step_within_its_room_evicts_nothing_and_a_short_one_keeps_to_it() -> None:
    w = torch.rand(16 * KIB, requires_grad=True)
    for room_bytes, evicts in ((40 * 64 * KIB, False), (10 * 64 * KIB, True)):
        w.grad = None
        with governed(room_bytes) as (recorder, governor), peak(torch.device("cpu")) as took:
            with recorder.forward():
                y = chain(w)
            y.sum().backward()
            del y
        assert bool(governor.evicted) is evicts and bool(governor.replayed) is evicts
        assert took.peak_bytes <= room_bytes and governor.excess is None


def test_where_nothing_can_be_evicted_the_step_goes_on_and_says_so() -> None:
    """All that is live is the program's own: each operation is above, and the heap is not made for each."""
    w, kept = torch.rand(16 * KIB, requires_grad=True), []
    with governed(4 * 64 * KIB) as (recorder, governor), recorder.forward():
        y = w
        for _ in range(200):
            y = y.sin()
            kept.append(y)
    operation, need, above, *_ = governor.excess
    assert operation == "aten::sin" and need == 64 * KIB and above == 196 * 64 * KIB
    assert governor.evicted == 0 and governor.searches <= 2 * 200


def test_a_retained_graph_replays_what_is_missing_and_no_more() -> None:
    """Once what came back was dropped at once, a second backward replayed each prefix anew."""
    n = 64
    w = torch.rand(4 * KIB, requires_grad=True)
    with governed((n // 2) * 16 * KIB) as (recorder, governor):
        with recorder.forward():
            y = chain(w, n)
        y.sum().backward(retain_graph=True)
        first = governor.replayed
        y.sum().backward()
        second = governor.replayed - first
    assert governor.evicted and 0 < first <= 2 * n and second <= 2 * n
    plain = w.detach().clone().requires_grad_()
    y = chain(plain, n)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(w.grad, plain.grad)  # type: ignore[arg-type]


def test_what_a_backward_saves_is_evicted_too() -> None:
    """``create_graph=True``: the first backward makes a graph of its own."""
    found, peaks = [], []
    for room_bytes in (1 << 30, 24 * 64 * KIB):
        w = torch.rand(16 * KIB, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with governed(room_bytes) as (recorder, governor), peak(torch.device("cpu")) as took:
            with recorder.forward():
                y = chain(w, 12).sum()
            (gradient,) = torch.autograd.grad(y, w, create_graph=True)
            gradient.square().sum().backward()
            del y, gradient
        found.append(w.grad)
        peaks.append(took.peak_bytes)
        assert bool(governor.evicted) is (room_bytes < 1 << 30)
    assert torch.equal(*found)  # type: ignore[arg-type]
    assert peaks[1] <= 24 * 64 * KIB < peaks[0]


def in_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(0.5)


@pytest.mark.parametrize("room_bytes", [0, 1 << 30], ids=["evicted", "with a copy"])
@pytest.mark.parametrize("place", range(4))
def test_a_write_past_the_version_counter_shows_as_in_a_plain_step(place: int, room_bytes: int) -> None:
    """Between forward and backward, to a source, to what was saved, and to what only a replay reads."""

    def forward(w: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = w * source.exp()
        b = a.sin()
        c = b.cos()
        return source, a, b, c

    found = []
    for limited in (False, True):
        w = torch.rand(KIB, generator=torch.Generator().manual_seed(0)).requires_grad_()
        source = torch.rand(KIB, generator=torch.Generator().manual_seed(1))
        if limited:
            with governed(room_bytes) as (recorder, governor):
                with recorder.forward():
                    made = forward(w, source)
                governor.relieve(1 << 20 if room_bytes == 0 else 0)
                in_data(made[place])
                made[3].square().sum().backward()
        else:
            made = forward(w, source)
            in_data(made[place])
            made[3].square().sum().backward()
        found.append(w.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


@pytest.mark.parametrize("room_bytes", [0, 1 << 30])
def test_a_write_in_place_leaves_replays_the_old_bytes(room_bytes: int) -> None:
    """A value has a copy that is the program's own storage, and an operation overwrites that."""
    found = []
    for limited in (False, True):
        w = torch.rand(64, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()

        def forward(w: torch.Tensor) -> torch.Tensor:
            left, right = (w * 2).unsafe_chunk(2, 1)  # with version counters of their own
            a = left.sigmoid_()
            b = right.tanh_()
            return (a * b).add_(1).exp_().sum() + (a + b).cos().mul_(2).sin_().sum()

        if limited:
            with governed(room_bytes) as (recorder, _):
                with recorder.forward():
                    loss = forward(w)
                loss.backward()
        else:
            forward(w).backward()
        found.append(w.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def gated(w: torch.Tensor, rounds: int) -> torch.Tensor:
    """Chunks of one storage are written in place after others were saved, as recurrent layers do."""
    h = torch.zeros_like(w[:, :1])
    for _ in range(rounds):
        a, b, c = (w + h).unsafe_chunk(3, 1)  # with version counters of their own
        a, b = a.sigmoid_(), b.tanh_()
        h = (h - c.mul_(a)).mul_(b)
    return h


@pytest.mark.parametrize("natural", [False, True], ids=["", "listened to"])
def test_what_is_saved_in_one_storage_goes_at_once_and_comes_back_at_once(natural: bool) -> None:
    found, peaks, replayed, rounds, each = [], [], [], 16, 96 * KIB
    for room_bytes in (7 * each, 1 << 30):
        w = torch.rand(8 * KIB, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with governed(room_bytes) as (recorder, governor), peak(torch.device("cpu")) as took:
            recorder.tape.core.natural = natural
            with recorder.forward():
                y = gated(w, rounds)
            y.sum().backward()
        found.append(w.grad)
        peaks.append(took.peak_bytes)
        replayed.append(governor.replayed)
    assert torch.equal(*found)  # type: ignore[arg-type]
    assert peaks[0] <= 7 * each < rounds * each < peaks[1]
    assert 0 < replayed[0] <= 8 * 6 * rounds


def test_a_replay_that_writes_in_place_leaves_nobody_what_it_overwrote() -> None:
    """While the write makes room another value is evicted, which starts from what is overwritten."""

    def forward(w: torch.Tensor) -> torch.Tensor:
        a = w.sin()
        b = a * 1.1
        a.tanh_()
        return b.cos().sum() + a.sum()

    found = []
    for limited in (False, True):
        w = torch.rand(KIB, generator=torch.Generator().manual_seed(0)).requires_grad_()
        if limited:
            with governed(0) as (recorder, governor):
                with recorder.forward():
                    loss = forward(w)
                loss.backward(retain_graph=True)
                governor.relieve(1 << 20)
                loss.backward()
        else:
            loss = forward(w)
            loss.backward(retain_graph=True)
            loss.backward()
        found.append(w.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]


def test_a_saved_tensor_that_is_overwritten_raises() -> None:
    w = torch.rand(KIB, requires_grad=True)
    with governed(0) as (recorder, _):
        with recorder.forward():
            y = w * 2
            z = y.sin()
        y.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


def test_a_long_chain_ends_without_recursion() -> None:
    w = torch.rand(4, requires_grad=True)
    with governed(1 << 30) as (recorder, _), recorder.forward():
        y = chain(w, 20_000)
        z = y.detach()
    del y, recorder
    gc.collect()
    assert z.shape == (4,)


def test_what_starts_from_a_source_that_is_gone_stays() -> None:
    w = torch.rand(16 * KIB, requires_grad=True)
    with governed(1 << 30) as (recorder, governor):
        source = torch.rand(16 * KIB)
        with recorder.forward():
            y = (w * source.exp()).sin()
        expected = (w.detach() * source.exp()).cos() * source.exp()
        del source
        gc.collect()
        governor.relieve(1 << 40)
        assert governor.evicted == 1  # the product, which starts from the copy of the exponential
        y.sum().backward()
    assert torch.equal(w.grad, expected)  # type: ignore[arg-type]


def test_a_storage_that_is_emptied_and_filled_again_is_read_again() -> None:
    """As FSDP does with a gathered weight."""
    w, weight = torch.rand(64, requires_grad=True), torch.rand(64)
    bytes_, storage = weight.clone(), weight.untyped_storage()
    with governed(0) as (recorder, governor):
        with recorder.forward():
            y = (w * weight.exp()).sin()
        governor.relieve(1 << 20)
        assert governor.evicted
        storage.resize_(0)
        storage.resize_(bytes_.nbytes)
        weight.data.copy_(bytes_)
        y.sum().backward()
    assert torch.equal(w.grad, (w.detach() * bytes_.exp()).cos() * bytes_.exp())  # type: ignore[arg-type]


def test_room_that_is_too_small_runs_each_operation_few_times() -> None:
    """A chain in half a dozen tensors: each value brings others back on the way, but not all of them."""
    n = 64
    w = torch.rand(4 * KIB, requires_grad=True)
    with governed(12 * 16 * KIB) as (recorder, governor):
        with recorder.forward():
            y = chain(w, n)
        y.sum().backward()
    assert governor.evicted and governor.replayed <= 12 * n


@pytest.mark.parametrize("change", [lambda t: t.conj(), lambda t: t.conj().imag, lambda t: t.real])
def test_marked_views_come_back_with_their_marks(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    found = []
    for limited in (False, True):
        w = torch.view_as_complex(torch.rand(64, 2, generator=torch.Generator().manual_seed(0)))
        w.requires_grad_()
        if limited:
            with governed(0) as (recorder, _):
                with recorder.forward():
                    y = change(w * w) * change(w.sin())
                y.abs().sum().backward()
        else:
            y = change(w * w) * change(w.sin())
            y.abs().sum().backward()
        found.append(w.grad)
    assert torch.equal(*found)  # type: ignore[arg-type]
