"""What goes wrong beneath a plan that moves values: slow links, full hosts, failing disks, kills. No bit is
wrong and no file is left.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from faults import before_each
from moving_net import LOSSLESS, X, net, same, step

import lowtide
from lowtide import meter, policies
from lowtide.extensions.moves.store import host as memory
from lowtide.extensions.moves.store.tier import StoreError


@pytest.mark.parametrize("what", ["write", "read"])
def test_a_failing_disk_leaves_the_training_state_intact(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    broken = False

    def fault(kind: str) -> None:
        if broken and kind == what:
            raise OSError(errno.EIO, "Input/output error")

    plain, limited = net(), net()
    before_each(monkeypatch, fault)
    stores = lowtide.Stores()
    lowtide.limit_memory(limited, policy=LOSSLESS["disk"], stores=stores)
    assert same(step(plain), step(limited))
    before = [p.detach().clone() for p in limited.parameters()]
    broken = True
    with pytest.raises(StoreError, match=f"could not {what}.*run the step again"):
        step(limited)
    broken = False
    assert same(before, [p.detach() for p in limited.parameters()])
    assert same(step(plain, seed=4), step(limited, seed=4))
    (tier,) = stores.tiers.values()
    assert tier.arena.taken_bytes == 0


def test_a_slow_link_takes_time_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every transfer is late: the step waits where the plan says, so that neither a bit nor a byte of the
    peak changes.
    """
    plain, limited = net(layers=2), net(layers=2)
    before_each(monkeypatch, lambda _: time.sleep(0.004))
    stores = lowtide.Stores()
    handle = lowtide.limit_memory(
        limited, policy=policies.offload("disk", min_bytes=1, window_bytes=40_000), stores=stores
    )
    for seed in range(2):
        assert same(step(plain, seed=seed), step(limited, seed=seed))
    limited.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    measured = meter.measure(lambda: limited(X).backward(), timeline=False)
    resident = meter.resident_bytes(limited) - sum(p.nbytes for p in limited.parameters()) + X.nbytes
    assert handle.plan is not None
    assert resident + handle.plan.slab_bytes + measured.peak_bytes == handle.plan.predicted_peak_bytes


def test_no_room_on_the_host_leaves_the_training_state_intact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before the first step under a plan nor in the middle of one that needs more than the layout."""
    room, real = False, memory._Mapping

    def reserve(*given: Any, **named: Any) -> Any:
        if not room:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(*given, **named)

    plain, limited = net(layers=2), net(layers=2)
    handle = lowtide.limit_memory(limited, policy=LOSSLESS["host"])
    before = [p.detach().clone() for p in limited.parameters()]
    monkeypatch.setattr(memory, "_Mapping", reserve)
    assert same(step(plain), step(limited))  # from which the plan is made
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"the host has no room.*larger budget, a codec, or the disk tier"
        ):
            step(limited)
    room = True
    assert same(step(plain), step(limited))
    room = False
    waiting = limited(X)
    with ThreadPoolExecutor(1) as pool, pytest.raises(StoreError, match="the host has no room"):
        pool.submit(limited, X).result()  # another thread's step before the first one's backward
    del waiting
    assert same(before, [p.detach() for p in limited.parameters()])
    assert same(step(plain, seed=3), step(limited, seed=3))
    (tier,) = handle._limiter.extensions[0].stores.tiers.values()
    assert tier.arena.taken_bytes == 0


def test_kill_at_any_moment_of_a_step_leaves_no_file(tmp_path: Path) -> None:
    model, x, source = net(layers=1), X, random.Random(0)
    plan = policies.offload("disk", str(tmp_path), min_bytes=1)(lowtide.trace(lambda: model(x)))
    assert plan.moves
    for turn in range(10):
        first, written = os.pipe()
        child = os.fork()
        if not child:
            try:
                while True:
                    with lowtide.apply(plan):
                        loss = model(x)
                    loss.backward()
                    os.write(written, b"x")
            finally:
                os._exit(1)
        if turn % 2:
            os.read(first, 1)  # from the second step on
        time.sleep(source.random() * 0.02)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert list(tmp_path.iterdir()) == []
        os.close(first)
        os.close(written)


def test_the_file_goes_with_the_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = net(layers=1)
    handle = lowtide.limit_memory(model, policy=policies.offload("disk", str(tmp_path), min_bytes=1))
    for _ in range(2):  # the second under the plan
        step(model)
    assert list(tmp_path.iterdir()) == []
    assert any(thread.name.startswith("lowtide-disk") for thread in set(threading.enumerate()) - before)
    handle.remove()
    assert set(threading.enumerate()) <= before
