"""Moves in compiled code: gradients are the same, budgets are held as predicted, nothing is left over."""

from __future__ import annotations

import copy
import errno
import gc
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_models import Model, gradients, real_peak
from torch import fx

import lowtide
from lowtide.compiled.choose_cuts import Asked
from lowtide.compiled.cut import cut
from lowtide.compiled.joint import Joint
from lowtide.compiled.lower import Generated
from lowtide.compiled.moving import stores, with_moves
from lowtide.compiled.planning import Beside, forecast
from lowtide.compiled.price import ByCall, costs_of
from lowtide.extensions.moves.store.disk import Disk
from lowtide.extensions.moves.store.tier import StoreError, Tier
from lowtide.meter import available, peak
from lowtide.plan.data import Offload
from lowtide.private import inductor, partitioning

counted = pytest.mark.skipif(not available(), reason="needs a C++ compiler for the counting allocator")
TICKETS = 8 * 64
"""Bytes of tickets, which are counted and lie beside what the allocator counts."""


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    gc.collect()
    left = [tier.arena.taken_bytes for tier in stores().tiers.values()]
    stores().close()
    assert not any(left)


def the_tier() -> Tier:
    (tier,) = stores().tiers.values()
    return tier


def same(model: torch.nn.Module, twin: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))


@counted
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_tier_goes_below_every_recomputation_as_predicted(tier: str) -> None:
    model, x = Model(layers=5), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    alone = lowtide.compile(copy.deepcopy(model), "min", backend="aot_eager")
    alone(x).backward()
    compiled = lowtide.compile(model, "min", backend="aot_eager", tiers=tier)
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    assert {one.decision.tier for one in handle.plan.moves} == {tier}
    assert not handle.plan.slab_bytes
    assert same(model, twin)
    for _ in range(2):
        real = real_peak(compiled, model, x)
        assert same(model, twin)
        assert abs(real - handle.predicted_peak_bytes) <= TICKETS
        assert real <= handle.plan.budget_bytes < 0.95 * lowtide.handle_of(alone).predicted_peak_bytes
    moved_bytes = sum(move.bytes for move in handle.plan.moves)
    assert the_tier().counts.written_bytes == the_tier().counts.read_bytes == 3 * moved_bytes


class MoveAll(inductor.CustomPartitionerFn):
    """Keeps every large result of the forward; all go through a tier, or none."""

    def __init__(self, tier: str | None, window: int, options: dict[str, Any] | None = None) -> None:
        self.tier, self.window, self.options = tier, window, options
        self.largest = self.predicted = 0
        self.text = ""

    def __call__(self, gm: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
        partitioning.clean_joint(gm)
        fusible = None if self.options is None else partitioning.default_fusible()
        joint = Joint(gm, num_fwd_outputs, (), fusible)
        halves = cut(joint, [key for call in joint.calls if call.forward for key in call.writes])
        large = [key for key, bytes_ in joint.bytes.items() if bytes_ >= 1 << 16]
        self.largest = max(joint.bytes[key] for key in large)
        if self.tier is not None:
            names = dict.fromkeys(large, Offload(self.tier))
            halves = with_moves(*halves, num_fwd_outputs, names, self.window)
        costs = costs_of(joint)
        code = Generated(joint, self.options, {}, halves) if self.options else ByCall(joint, costs, halves)
        self.predicted = max(part.peak_bytes for part in code(joint.size))
        if self.options is not None:
            _, strides = inductor.generated(halves[0], False, self.options)
            self.text, _ = inductor.generated(halves[1], True, self.options, strides)
        return halves

    def uuid(self) -> str:
        return f"{self.tier} {self.window}"


def compiled_by(partitioner: MoveAll, model: torch.nn.Module) -> Any:
    if partitioner.options is None:
        backend = inductor.aot_autograd(fw_compiler=inductor.boxed_nop, partition_fn=partitioner)
        return torch.compile(model, backend=backend)
    settings = {**partitioner.options, "custom_partitioner_fn": partitioner}
    return torch.compile(
        model, backend=lambda module, inputs: inductor.compile_with(module, inputs, settings)
    )


def peak_of(compiled: Any, model: torch.nn.Module, x: torch.Tensor) -> int:
    """The most that forward or backward allocates."""
    model.zero_grad(set_to_none=True)
    with peak("cpu") as seen:
        compiled(x).backward()
    return seen.peak_bytes


@counted
@pytest.mark.parametrize("window", [1 << 19, 1 << 20])
def test_what_is_under_way_is_what_the_window_allows_however_late(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    source, write, read = random.Random(0), Disk._write, Disk._read
    monkeypatch.setattr(Disk, "_write", lambda *given: (time.sleep(source.random() * 0.004), write(*given)))
    monkeypatch.setattr(Disk, "_read", lambda *given: (time.sleep(source.random() * 0.004), read(*given)))
    model, x = Model(dropout=0.2), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    torch.manual_seed(1)
    twin(x).backward()
    partitioner = MoveAll("disk", window)
    compiled = compiled_by(partitioner, model)
    torch.manual_seed(1)
    compiled(x).backward()
    assert same(model, twin)
    assert partitioner.largest <= window
    for _ in range(2):
        assert abs(peak_of(compiled, model, x) - partitioner.predicted) <= TICKETS + 16
    with peak("cpu") as seen:
        loss = compiled(x)
        small = 3 * (2 * 4 * 1024 + 32 * 1024)  # two words a row of each norm, and dropout's masks
        assert seen.live_bytes == loss.nbytes + small
        loss.backward()


class Enough(Exception):
    pass


def test_inductor_reads_while_it_computes() -> None:
    partitioner = MoveAll("disk", 1 << 20, {})

    def enough(*_: Any, **__: Any) -> Any:
        raise Enough

    def backend(module: Any, inputs: Any) -> Any:
        return inductor.compile_with(module, inputs, {"custom_partitioner_fn": partitioner}, enough)

    with pytest.raises(inductor.BackendCompilerFailed, match="Enough"):
        torch.compile(Model(2), backend=backend)(torch.randn(1024, 32))
    came: dict[str, int] = {}
    meanwhile: list[int] = []
    products = 0
    for line in partitioner.text.splitlines():
        products += "extern_kernels.mm" in line
        if found := re.search(r"(\w+) = torch.ops.lowtide.fetch.default", line):
            came[found[1]] = products
        elif found := re.match(r" *(\w+) = (\w+)$", line):
            came[found[1]] = came.get(found[2], 0)
        elif found := re.search(r"lowtide.arrive.default\((\w+),", line):
            meanwhile.append(products - came[found[1]])
    assert len(meanwhile) >= 8
    assert sum(count > 0 for count in meanwhile) >= 0.6 * len(meanwhile), "the first are read at once"


@pytest.mark.slow
def test_inductor_gives_the_same_as_without_moves_as_predicted() -> None:
    model, x = Model(layers=2), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    kept = MoveAll(None, 1 << 19, {})
    compiled_by(kept, twin)(x).backward()
    torch._dynamo.reset()
    gone = MoveAll("disk", 1 << 19, {})
    compiled = compiled_by(gone, model)
    compiled(x).backward()
    assert same(model, twin)
    assert the_tier().counts.read_bytes > 0
    assert gone.predicted < 0.8 * kept.predicted
    assert abs(peak_of(compiled, model, x) - gone.predicted) <= 0.01 * gone.predicted


@pytest.mark.slow
def test_inductor_holds_a_budget_with_moves_as_predicted() -> None:
    model, x = Model(layers=5), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    alone = forecast(copy.deepcopy(model), "min", x)
    compiled = lowtide.compile(model, "min", tiers="disk")
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    assert handle.plan.moves
    for a, b in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    real = real_peak(compiled, model, x)
    assert abs(real / handle.predicted_peak_bytes - 1) <= 0.01
    assert real <= handle.plan.budget_bytes < alone.predicted_peak_bytes


def moving(layers: int = 2) -> tuple[Any, Model, Model, torch.Tensor]:
    """A compiled model whose values wait on the disk, the model, its twin with gradients, what goes in."""
    model, x = Model(layers), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    return compiled_by(MoveAll("disk", 1 << 19), model), model, twin, x


def test_a_graph_that_is_dropped_takes_what_it_stored_along() -> None:
    compiled, _, _, x = moving()
    loss = compiled(x)
    assert the_tier().arena.taken_bytes >= 1 << 20
    slab = the_tier().counts.slab_bytes
    del loss
    assert the_tier().arena.taken_bytes == 0
    for _ in range(3):
        compiled(x)
    assert the_tier().counts.slab_bytes == slab


def test_forwards_whose_backwards_come_in_any_order() -> None:
    compiled, model, twin, x = moving()
    other = torch.randn(1024, 32)
    twin(other).backward()
    first, second = compiled(x), compiled(other)
    first.backward()
    second.backward()
    assert same(model, twin)
    model.zero_grad()
    first, second = compiled(x), compiled(other)
    second.backward()
    first.backward()
    for a, b in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(a, b)


def test_a_tier_that_is_retired_under_a_step_serves_it_to_its_end() -> None:
    compiled, model, twin, x = moving()
    loss = compiled(x)
    stores().close()
    loss.backward()
    assert same(model, twin)
    model.zero_grad()
    compiled(x).backward()
    assert same(model, twin)


@pytest.mark.parametrize("what", ["write", "read"])
def test_a_failing_disk_fails_the_step_and_not_the_next(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    compiled, model, twin, x = moving()
    broken = True
    real = getattr(Disk, f"_{what}")

    def faulty(*given: Any) -> Any:
        if broken:
            raise OSError(errno.EIO, "Input/output error")
        return real(*given)

    monkeypatch.setattr(Disk, f"_{what}", faulty)
    with pytest.raises(StoreError, match=f"could not {what} its file.*run the step again"):
        compiled(x).backward()
    assert not gradients(model)
    broken = False
    compiled(x).backward()
    assert same(model, twin)


def test_an_abandoned_backward_leaves_nothing() -> None:
    model, x = Model(2), torch.randn(1024, 32)

    class Stop(Exception):
        pass

    def stop(_: torch.Tensor) -> None:
        raise Stop

    compiled = compiled_by(MoveAll("disk", 1 << 19), model)
    hook = model.blocks[0].norm.weight.register_hook(stop)
    with pytest.raises(Stop):
        compiled(x).backward()
    hook.remove()
    model.zero_grad()
    loss = compiled(x)
    with pytest.raises(RuntimeError, match="shape"):
        loss.backward(torch.ones(3))
    loss.backward()
    assert len(gradients(model)) == 12


def test_another_budget_and_removal_give_the_file_back() -> None:
    model, x = Model(layers=5), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    compiled = lowtide.compile(model, "min", backend="aot_eager", tiers="disk")
    compiled(x).backward()
    file, handle = the_tier()._file, lowtide.handle_of(compiled)
    for change in (lambda: handle.set_budget("100%"), handle.remove):
        change()
        assert not stores().tiers and file.closed
        model.zero_grad()
        compiled(x).backward()
        assert same(model, twin)
        assert not stores().tiers


def test_what_tiers_cannot_do_is_refused(tmp_path: Path) -> None:
    model = Model(1)
    with pytest.raises(lowtide.PlanError, match=r"Offload\('tape'\): there is no such tier"):
        lowtide.compile(model, "60%", tiers="tape")
    with pytest.raises(lowtide.PlanError, match="is no tier: give 'host', 'disk'"):
        lowtide.compile(model, "60%", tiers=[lowtide.Compress("int8")])  # type: ignore[list-item]
    with pytest.raises(lowtide.PlanError, match="tiers are for a model that is one graph: leave out tiers"):
        lowtide.compile(model, "60%", tiers="disk", regional=True)
    with pytest.raises(lowtide.PlanError, match="leave out dynamic=True, or tiers"):
        lowtide.compile(model, "60%", tiers="disk", dynamic=True)
    with pytest.raises(lowtide.PlanError, match="CUDA graphs"):
        lowtide.compile(model, "60%", tiers="disk", options={"triton.cudagraphs": True})
    several = lowtide.compile(torch.nn.Linear(8, 8), "60%", backend="aot_eager", tiers="disk")
    with pytest.raises(lowtide.PlanError, match="tiers are for a model that is one graph and"):
        several(torch.randn(4, 8))
    nowhere = Offload("disk", str(tmp_path / "missing"))
    lost = lowtide.compile(Model(1), "60%", backend="aot_eager", tiers=nowhere)
    with pytest.raises(lowtide.PlanError, match="missing cannot hold lowtide's file"):
        lost(torch.randn(64, 32))
    x = torch.randn(64, 32)
    torch._dynamo.mark_dynamic(x, 0)
    varies = lowtide.compile(Model(1), "60%", backend="aot_eager", tiers="disk")
    with pytest.raises(lowtide.PlanError, match="this one leaves some open: leave out mark_dynamic"):
        varies(x)


def test_compiled_code_is_not_taken_for_that_of_another_tier() -> None:
    ways = ((), (Offload("host"),), (Offload("disk"),), (Offload("disk", "folder"),))
    assert len({str(Beside(Asked("60%", tiers), None, 0).facts) for tiers in ways}) == 4


def test_sizes_compile_one_by_one() -> None:
    model = Model(5)
    twin = copy.deepcopy(model)
    compiled = lowtide.compile(model, "min", backend="aot_eager", tiers="disk")
    for rows in (1024, 768):
        model.zero_grad()
        twin.zero_grad()
        x = torch.randn(rows, 32)
        twin(x).backward()
        compiled(x).backward()
        assert same(model, twin)
    assert len(lowtide.handle_of(compiled).plans) == 2


def test_the_operations_are_what_they_say_to_the_compiler() -> None:
    x = torch.randn(64, 32)
    ticket = torch.ops.lowtide.send(x, "disk", "")
    after = torch.ops.lowtide.settle(ticket, x, ticket)
    coming = torch.ops.lowtide.fetch(after, [64, 32], [32, 1], torch.float32, after)
    here = torch.ops.lowtide.arrive(coming, [64, 32], [32, 1], torch.float32, torch.device("cpu"))
    assert torch.equal(here, x)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.lowtide.send, (x, "disk", ""), test_utils=checks)
    torch.library.opcheck(torch.ops.lowtide.settle, (after, x, after), test_utils=checks)
    with pytest.raises(StoreError, match="asked for as"):
        torch.ops.lowtide.fetch(after, [32, 64], [64, 1], torch.float32, after)
    with pytest.raises(StoreError, match="the ticket of a moved value is gone"):
        copied = after.clone()
        del after, ticket
        torch.ops.lowtide.fetch(copied, [64, 32], [32, 1], torch.float32, copied)
