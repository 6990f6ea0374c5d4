"""Measure 6: after any failure the state is whole or the optimizer says that it is not, and training resumes
identically.
"""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.throttled_link import ThrottledLink
from runs import ADAMW, MODES, batch, equal, model, same_state, train

from lowtide.optim import HostOptimizer, OptimError


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_in_backward(mode: str) -> None:
    """The failed backward is forgotten with zero_grad, and nothing of it is left."""
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.6, **MODES[mode](), **ADAMW
    )
    train(plain_model, plain, range(2))
    train(ours_model, ours, range(2))
    handle = ours_model.first.weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours_model(batch(99)).backward()
    handle.remove()
    train(plain_model, plain, range(2, 5))
    train(ours_model, ours, range(2, 5))
    assert equal(plain_model, ours_model)
    assert same_state(plain.state_dict(), ours.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite(mode: str) -> None:
    """Clipping says so before anything changes; the step is skipped and training goes on as if it had not
    been.
    """
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.6, **MODES[mode](), **ADAMW
    )
    train(plain_model, plain, range(2))
    train(ours_model, ours, range(2))
    ours.zero_grad()
    ours_model(batch(0) * float("inf")).backward()
    with pytest.raises(RuntimeError, match=r"non-finite|cannot be clipped"):
        ours.clip_grad_norm_(1.0, error_if_nonfinite=True)
    train(plain_model, plain, range(2, 5))
    train(ours_model, ours, range(2, 5))
    assert equal(plain_model, ours_model)


@pytest.mark.parametrize("mode", MODES)
def test_a_gradient_that_is_not_finite_and_not_looked_at(mode: str) -> None:
    """Without clipping it goes where `torch.optim` lets it go: into the same elements, on both sides of the
    split, and nowhere else.
    """
    plain_model, ours_model = model(), model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    ours = HostOptimizer(
        torch.optim.AdamW, ours_model.parameters(), host_fraction=0.6, **MODES[mode](), **ADAMW
    )
    for net in (plain_model, ours_model):
        net.first.weight.register_hook(
            lambda gradient: gradient.index_fill(1, torch.tensor([3]), float("inf"))
        )
    train(plain_model, plain, range(1))
    train(ours_model, ours, range(1))
    spoilt = [torch.isnan(p) for p in plain_model.parameters()]
    assert 0 < sum(int(where.sum()) for where in spoilt) < sum(where.numel() for where in spoilt)
    for a, b, where in zip(plain_model.parameters(), ours_model.parameters(), spoilt, strict=True):
        assert torch.equal(where, torch.isnan(b))
        assert torch.equal(a[~where], b[~where])


@pytest.mark.parametrize("host", ["memory", "disk"])
def test_out_of_host_memory(host: Any, tmp_path: Path) -> None:
    """Nothing is taken, nothing changes, and the message says what to do; with more room the same optimizer
    goes on.
    """
    net = model()
    before = [p.detach().clone() for p in net.parameters()]
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), host=host, host_limit="8KiB", **ADAMW)
    net(batch(0)).backward()
    for _ in range(2):
        with pytest.raises(OptimError, match="host_limit"):
            ours.step()
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert ours.host_bytes == 0
    assert not ours.state
    ours._placement.pool.limit_bytes = None
    ours.step()
    plain_model = model()
    plain = torch.optim.AdamW(plain_model.parameters(), fused=True, **ADAMW)
    plain_model(batch(0)).backward()
    plain.step()
    assert equal(plain_model, net)


def test_a_full_disk(tmp_path: Path) -> None:
    """A file may not become larger than the limit of the process, as on a disk that is full."""
    import resource

    net = torch.nn.Linear(300, 300)
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), host="disk", host_folder=tmp_path)
    net(torch.ones(1, 300)).sum().backward()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OptimError, match=r"no room .* host_folder="):
            ours.step()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
    ours.step()
    assert not list(tmp_path.iterdir())


class Broken(ThrottledLink):
    """Fails at the n-th transfer."""

    left = 10**9

    def up(self, device: torch.Tensor, host: torch.Tensor) -> Any:
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("the link is gone")
        return super().up(device, host)


def test_an_interrupted_update_is_not_mistaken_for_a_whole_one() -> None:
    whole_model = model()
    whole = torch.optim.AdamW(whole_model.parameters(), fused=True, **ADAMW)
    train(whole_model, whole, range(6))
    net, link = model(), Broken(up_bytes_per_second=2e5)  # transfers are under way when it fails
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), link=link, chunk_bytes=4096, **ADAMW)
    train(net, ours, range(3))
    saved = [{k: v.clone() for k, v in net.state_dict().items()}, copy.deepcopy(ours.state_dict())]
    link.left = 2
    with pytest.raises(ConnectionError):
        train(net, ours, range(3, 4))
    for call in (ours.step, ours.state_dict, ours.finish):
        with pytest.raises(OptimError, match="Load the last checkpoint"):
            call()
    link.left = 10**9
    net.load_state_dict(saved[0])
    ours.load_state_dict(saved[1])
    train(net, ours, range(3, 6))
    assert equal(whole_model, net)


class Telling(ThrottledLink):
    """Says so, and waits for the end, in the midst of the update of a step."""

    def __init__(self, said: int) -> None:
        super().__init__()
        self.said, self.transfers, self.last = said, 0, False

    def up(self, device: Any, host: Any) -> Any:
        self.transfers += 1
        if self.last and self.transfers == 3:
            os.write(self.said, b"in the update")
            time.sleep(600)
        return super().up(device, host)

    def begin_step(self) -> None:
        self.transfers = 0


def train_until_killed(said: int, scratch: Path, file: Path) -> None:
    net, link = model(), Telling(said)
    optimizer = HostOptimizer(
        torch.optim.AdamW, net.parameters(), link=link, chunk_bytes=4096, host="disk",
        host_folder=str(scratch), stream_gradients=True, host_fraction=0.8, **ADAMW,
    )  # fmt: skip
    train(net, optimizer, range(4))
    torch.save([net.state_dict(), optimizer.state_dict()], file)
    train(net, optimizer, range(4, 5))
    link.last = True
    train(net, optimizer, range(5, 6))


def test_kill_in_an_update_then_resume(tmp_path: Path) -> None:
    """kill -9 while some parameters are updated and others are not; the resumed run is bitwise the one that
    was never killed.
    """
    scratch, file = tmp_path / "scratch", tmp_path / "saved.pt"
    scratch.mkdir()
    reader, said = os.pipe()
    child = os.fork()
    if not child:
        try:
            train_until_killed(said, scratch, file)
        finally:
            os._exit(1)
    assert os.read(reader, 13) == b"in the update"
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(reader)
    os.close(said)
    assert not list(scratch.iterdir())  # files without a name go with the process
    saved = torch.load(file, weights_only=True)
    net = model()
    optimizer = HostOptimizer(torch.optim.AdamW, net.parameters(), host_fraction=0.8, **ADAMW)
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(net, optimizer, range(4, 8))
    whole_model = model()
    whole = torch.optim.AdamW(whole_model.parameters(), fused=True, **ADAMW)
    train(whole_model, whole, range(8))
    assert equal(whole_model, net)


def test_nothing_is_left_behind() -> None:
    """Hooks and threads go with the optimizer."""
    net = model()
    threads = threading.active_count()
    ours = HostOptimizer(
        torch.optim.AdamW,
        net.parameters(),
        stream_gradients=True,
        delayed=True,
        delay_after=0,
        link=ThrottledLink(),
        **ADAMW,
    )
    train(net, ours, range(3))
    assert threading.active_count() > threads
    ours.close()
    assert threading.active_count() == threads
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), stream_gradients=True, **ADAMW)
    net.zero_grad()
    del ours
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode.endswith("streamed")])
def test_a_model_goes_with_its_optimizer(mode: str) -> None:
    """Gradients on the host keep nothing alive, and say so when their optimizer is gone."""
    net = model()
    ours = HostOptimizer(torch.optim.AdamW, net.parameters(), **MODES[mode](), **ADAMW)
    train(net, ours, range(2))
    gone = [weakref.ref(net.first.weight), weakref.ref(ours)]
    other, kept = model(), model()
    theirs = HostOptimizer(torch.optim.AdamW, kept.parameters(), **MODES[mode](), **ADAMW)
    train(kept, theirs, range(1))
    ours.close()
    theirs.close()
    del net, ours, theirs
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    with pytest.raises(OptimError, match="gone"):
        kept(batch(0)).backward()
    kept.zero_grad()
    kept(batch(0)).backward()
    other(batch(0)).backward()
