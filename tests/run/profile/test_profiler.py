"""What the step that is looked at leaves behind: nothing, in random states, in modules, and nearly nothing in
memory.
"""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_model import Block, needs_meter
from torch import nn

import lowtide
from lowtide import meter


class Net(nn.Module):
    """Blocks; ``between`` is called in the forward."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.between = between
        self.noted = False
        self.seen: list[torch.Tensor] = []
        self.cache: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.between(self, x).square().mean()


def from_numpy(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(np.random.rand(x.shape[-1]).astype("float32"))


def from_python(net: Net, x: torch.Tensor) -> torch.Tensor:
    return x * random.uniform(0.5, 1.5)


def hooks_at_first_step(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Installs hooks once and notes it, as models do that collect the outputs of their layers."""
    if not net.noted:
        net.noted = True
        for block in net.blocks:
            block.register_forward_hook(lambda _module, _args, output: net.seen.append(output))
    total = x * len(net.seen)
    net.seen.clear()
    return x + total


def cached(net: Net, x: torch.Tensor) -> torch.Tensor:
    if "scale" not in net.cache:
        net.cache["scale"] = torch.linspace(0.5, 1.5, x.shape[-1])
    return x * net.cache["scale"]


def through_values(
    between: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The same in a model that asks for a number."""
    return lambda net, x: between(net, x if x.sum().item() > -1e9 else -x)


def through_addresses(
    between: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """The same in a model that asks for an address."""
    return lambda net, x: between(net, x if x.data_ptr() else -x)


CASES = {"numpy": from_numpy, "python": from_python, "hooks": hooks_at_first_step, "cache": cached}
CASES |= {
    f"{name} {way.__name__}": way(CASES[name])
    for name in ("numpy", "python", "hooks", "cache")
    for way in (through_values, through_addresses)
}


def train(net: Net, x: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for number in range(3):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(number)
        net.zero_grad()
        loss = net(x)
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    return found


@pytest.mark.parametrize("between", CASES.values(), ids=CASES.keys())
def test_planning_at_the_first_step_changes_nothing(
    between: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    torch.manual_seed(0)
    plain, x = Net(between), torch.randn(256, 32)
    limited = Net(between)
    limited.load_state_dict(plain.state_dict())
    lowtide.limit_memory(limited, "85%")
    for one, other in zip(train(plain, x), train(limited, x), strict=True):
        assert torch.equal(one, other)


class MaskedLoss(nn.Module):
    """Returns, beside the loss, a mask that autograd saves, an input and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.register_buffer("scale", torch.ones(32))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | None]:
        h = x
        for block in self.blocks:
            h = block(h)
        mask = (torch.rand(h.shape) > 0.5).float()
        return {
            "loss": ((h - x).square() * mask).sum() / mask.sum(),
            "out": h,
            "mask": mask,
            "x": x,
            "scale": self.get_buffer("scale"),
        }


@needs_meter
def test_outputs_that_the_model_itself_keeps_are_not_taken_for_the_callers() -> None:
    torch.manual_seed(0)
    model, x = MaskedLoss(), torch.randn(64, 32)
    with pytest.raises(lowtide.BudgetError) as caught:
        lowtide.limit_memory(copy.deepcopy(model), 1024).prepare(x)
    assert caught.value.smallest_bytes is not None
    handle = lowtide.limit_memory(model, caught.value.smallest_bytes)
    peaks = []
    for number in range(3):
        torch.manual_seed(number)

        def step() -> None:
            loss = model(x)["loss"]
            loss.backward()

        resident = meter.resident_bytes(model) + x.nbytes
        peaks.append(resident + meter.measure(step, timeline=False).peak_bytes)
        model.zero_grad()
    assert handle.plan is not None
    assert max(peaks[1:]) <= caught.value.smallest_bytes
    assert peaks[2] == pytest.approx(handle.plan.predicted_peak_bytes, rel=0.01)


@needs_meter
def test_planning_takes_little_more_than_a_small_step() -> None:
    torch.manual_seed(0)
    model, x = Net(cached), torch.randn(256, 32)
    plain = copy.deepcopy(model)
    step = meter.measure(lambda: plain(x).backward(), timeline=False).peak_bytes
    lowtide.limit_memory(model, "85%")
    planning = meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes
    assert planning <= 2 * (step + meter.resident_bytes(plain))


class Stem(nn.Module):
    """Convolutions that allocate several times what they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(8, 8, 3, padding=1), nn.SiLU(), nn.Conv3d(8, 8, 3, padding=1), nn.SiLU()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean((1, 2, 3, 4)).sum()


@needs_meter
def test_timing_operations_keeps_within_the_smallest_budget_already() -> None:
    torch.manual_seed(0)
    model, x = Stem(), torch.randn(1, 8, 8, 8, 8)
    with pytest.raises(lowtide.BudgetError) as refusal:
        lowtide.limit_memory(copy.deepcopy(model), 1024).prepare(x)
    assert refusal.value.smallest_bytes is not None
    lowtide.limit_memory(model, refusal.value.smallest_bytes)
    resident = meter.resident_bytes(model) + x.nbytes
    before = [parameter.detach().clone() for parameter in model.parameters()]
    first = meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes
    copied = x.nbytes  # the convolution's kernel asks to write what it reads, which shares its bytes no more
    assert resident + first <= refusal.value.smallest_bytes + copied
    assert all(map(torch.equal, before, model.parameters()))


class OddStrides(nn.Module):
    """Batch norm over a transposed view, whose strides the CPU's kernel does not keep."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(32) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = block(norm(x.transpose(1, 2)).transpose(1, 2))
        return x.square().mean()


@needs_meter
def test_batch_norm_of_odd_strides() -> None:
    torch.manual_seed(0)
    model, x = OddStrides(), torch.randn(8, 32, 32)
    handle = lowtide.limit_memory(model, "75%")
    handle.prepare(x)
    resident = meter.resident_bytes(model) + x.nbytes
    measured = meter.measure(lambda: model(x).backward(), timeline=False)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert resident + measured.peak_bytes <= handle.plan.budget_bytes


class LooksAtItsMask(nn.Module):
    """Leaves its mask out where nothing is masked, as model libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        needless = bool((mask == 1).all())
        for block in self.blocks:
            x = block(x)
            x = torch.cat([x.sinh().tanh(), x.cosh().log()], dim=1)[:, :32] if needless else x * mask
        return x.square().mean()


@needs_meter
@pytest.mark.filterwarnings("ignore:a planned step took")
def test_a_step_that_takes_the_other_branch_is_looked_at_next() -> None:
    torch.manual_seed(0)
    plain, x, masks = LooksAtItsMask(), torch.randn(64, 32), (torch.zeros(64, 1), torch.ones(64, 1))
    limited = copy.deepcopy(plain)
    with pytest.raises(lowtide.BudgetError) as refusal:
        lowtide.limit_memory(copy.deepcopy(plain), 1024).prepare(x, masks[1])
    assert refusal.value.smallest_bytes is not None
    budget = int(1.1 * refusal.value.smallest_bytes)
    handle = lowtide.limit_memory(limited, budget)
    taken = []
    for mask in (masks[0], masks[0], *[masks[1]] * 10):
        loss = plain(x, mask)
        loss.backward()
        resident = meter.resident_bytes(limited) + x.nbytes + mask.nbytes
        measured = meter.measure(lambda mask=mask: _and_back(limited(x, mask)), timeline=False)
        taken.append(resident + measured.peak_bytes)
        assert torch.equal(loss, measured.value)
        for one, other in zip(plain.parameters(), limited.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            assert torch.equal(one.grad, other.grad)
        plain.zero_grad()
        limited.zero_grad()
    assert handle.graph is not None
    assert any(operation.name == "aten.sinh.default" for operation in handle.graph.operations)
    assert max(taken[-3:]) <= budget  # steps that were above it leave more room to the next
    assert sum(bytes_ > budget for bytes_ in taken) <= 4
    assert len(handle.plans) == 1


def _and_back(loss: torch.Tensor) -> torch.Tensor:
    loss.backward()
    return loss.detach()


class Enlarges(nn.Module):
    """One convolution takes most of the step: it reads, writes and unfolds what the rest is small beside."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self.conv(nn.functional.interpolate(x, scale_factor=2, mode="bicubic"))
            .mean((2, 3))
            .square()
            .sum()
        )


@needs_meter
def test_the_smallest_budget_that_is_named_does_where_one_operation_is_most_of_the_step() -> None:
    torch.manual_seed(0)
    model, x = Enlarges(), torch.randn(4, 3, 16, 16)
    with pytest.raises(lowtide.BudgetError) as refusal:
        lowtide.limit_memory(copy.deepcopy(model), 1024).prepare(x)
    assert refusal.value.smallest_bytes is not None
    lowtide.limit_memory(model, refusal.value.smallest_bytes)
    for _ in range(2):
        peak = meter.measure(lambda: model(x).backward(), timeline=False).peak_bytes
        model.zero_grad()
    assert meter.resident_bytes(model) + x.nbytes + peak <= refusal.value.smallest_bytes


class LeavesOut(nn.Module):
    """Leaves layers out by chance: for a low number, as transformers do, or for a high one."""

    def __init__(self, low: bool, stays: bool) -> None:
        super().__init__()
        self.low, self.stays = low, stays
        self.layers = nn.ModuleList(
            [
                nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
                for _ in range(4)
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            drawn = torch.rand([]) if self.stays else torch.rand(1).item()
            if not (drawn < 0.5 if self.low else drawn > 0.5):
                x = x + layer(x)
        return x.square().mean()


@needs_meter
@pytest.mark.parametrize(
    ("stays", "low"),
    [
        (True, True),
        (False, False),
        pytest.param(True, False, marks=pytest.mark.slow),
        pytest.param(False, True, marks=pytest.mark.slow),
    ],
)
def test_layers_left_out_by_chance_are_planned_for(low: bool, stays: bool, same: Callable[..., bool]) -> None:
    """Whichever run, they are held; at most four steps are written down, one after the other."""
    torch.manual_seed(0)
    plain, x = LeavesOut(low, stays), torch.randn(200, 32)
    model = copy.deepcopy(plain)
    budget = 735_000  # the longest step takes 1,309,576 bytes when nothing is evicted
    handle = lowtide.limit_memory(model, budget)
    graphs, told = list[Any](), list[str]()
    for seed in range(40):
        losses: list[torch.Tensor] = []

        def step(of: nn.Module, seed: int = seed, losses: list[torch.Tensor] = losses) -> None:
            torch.manual_seed(seed)
            loss = of(x)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach())

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            resident = meter.resident_bytes(model) + x.nbytes
            peak = meter.measure(lambda: step(model), timeline=False).peak_bytes
        assert resident + peak <= budget, seed
        step(plain)
        assert same(*losses)
        for a, b in zip(plain.parameters(), model.parameters(), strict=True):
            assert same(a.grad, b.grad)
            a.grad = b.grad = None
        told += [str(one.message) for one in warned]
        if handle.graph is not None and handle.graph not in graphs:
            graphs.append(handle.graph)
    assert all("no tensor that backward begins from" in text for text in told) and len(told) <= 1
    assert 1 < len(graphs) <= 4 and len(handle.plans) == 1


class Looks(nn.Module):
    """Takes a gradient of its own inside, and gets an argument that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(32, 128), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        weight = self.out.weight
        inner = nn.functional.linear(torch.tanh(self.lin(x)), weight).softmax(-1).square().sum()
        (grad,) = torch.autograd.grad(inner, weight, create_graph=True)
        return nn.functional.linear(torch.tanh(self.lin(x)), weight - 0.1 * grad).softmax(-1).square().sum()


@needs_meter
def test_a_gradient_inside_and_an_unused_argument_are_counted(same: Callable[..., bool]) -> None:
    torch.manual_seed(0)
    plain, x, unused = Looks(), torch.randn(64, 32), torch.randn(1000)
    model = copy.deepcopy(plain)
    with pytest.raises(lowtide.BudgetError) as refusal:
        lowtide.limit_memory(copy.deepcopy(model), 1024).prepare(x, unused)
    handle = lowtide.limit_memory(model, refusal.value.smallest_bytes)
    for _ in range(2):
        model.zero_grad()
        resident = meter.resident_bytes(model) + x.nbytes + unused.nbytes
        peak = resident + meter.measure(lambda: model(x, unused).backward(), timeline=False).peak_bytes
    plain(x, unused).backward()
    assert handle.plan is not None
    assert handle.plan.budget_bytes is not None
    assert peak <= handle.plan.budget_bytes
    assert handle.graph is not None
    assert sum(s.bytes == unused.nbytes for s in handle.graph.storages if s.kind == "input") == 1
    assert not any(
        operation.replayable for operation in handle.graph.operations if operation.phase == "backward"
    )
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert same(a.grad, b.grad)


@needs_meter
def test_the_first_step_is_measured_without_the_optimizers_state_that_it_has_not_yet() -> None:
    model, x = Net(lambda _, x: x), torch.randn(512, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "100%", optimizer=optimizer)
    for step in range(2):
        resident = meter.resident_bytes(model, optimizer) + x.nbytes
        with meter.peak("cpu") as seen:
            model(x).sum().backward()
        assert handle.measured_peak_bytes == pytest.approx(resident + seen.peak_bytes, abs=2048), step
        optimizer.step()
        optimizer.zero_grad()


def test_a_profiled_step_collects_no_garbage_of_its_own() -> None:
    threshold = 700
    begun: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and gc.get_threshold()[0] != threshold:
            begun.append(info["generation"])

    before = gc.get_threshold()
    gc.set_threshold(threshold, 10, 10)
    gc.callbacks.append(note)
    try:
        net, seen = Net(lambda _, x: x), []
        lowtide.limit_memory(net, budget="100%")
        loss = net(torch.randn(8, 32))
        seen.append(gc.get_threshold()[0])
        loss.backward()
        assert seen[0] > threshold and gc.get_threshold() == (threshold, 10, 10) and not begun
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)


@needs_meter
def test_a_profiled_step_that_is_over_holds_nothing_of_its_inputs() -> None:
    """Small ones are held while it lasts, so that what starts from them can come back."""
    net = Net(lambda _, x: x)
    lowtide.limit_memory(net, budget="100%")
    with meter.peak("cpu") as seen:
        net(torch.randn(2, 32)).backward()
        gradients = sum(parameter.nbytes for parameter in net.parameters())
        assert seen.live_bytes == gradients
