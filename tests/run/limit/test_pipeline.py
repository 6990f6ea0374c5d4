"""One budget for the steps of a pipeline, on real processes: PyTorch's schedules, stages and losses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import BudgetError, PlanError, meter

pytestmark = [
    on_each_backend,
    pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator"),
]

WIDTH, BATCH = 16, 64
SCHEDULES: dict[str, Any] = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, blocks: int = 2, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class Run:
    """This rank's part of a pipeline, and its steps."""

    def __init__(self, schedule: str, micro_batches: int = 4, checkpointed: bool = False) -> None:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = {"1f1b": [rank], "zbv": [rank, 2 * ranks - 1 - rank]}.get(schedule, [rank, rank + ranks])
        count = ranks * len(mine)
        self.stages = []
        for index in mine:
            torch.manual_seed(index)
            module = Stage(checkpointed=checkpointed)
            self.stages.append(pipelining.PipelineStage(module, index, count, torch.get_default_device()))
        self.schedule = SCHEDULES[schedule](
            self.stages if len(mine) > 1 else self.stages[0],
            n_microbatches=micro_batches,
            loss_fn=nn.functional.mse_loss,
        )
        self.parameters = [p for stage in self.stages for p in stage.submod.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)
        x = torch.randn(micro_batches * BATCH, WIDTH, generator=seeded(0))
        self.given = (x,) if 0 in mine else ()
        self.targets = {"target": x.flip(0)} if count - 1 in mine else {}

    def step(self) -> tuple[list[float], list[Tensor], int]:
        """Losses, gradients, and the most bytes that the step takes."""
        losses: list[Tensor] = []
        more = {**self.targets, "losses": losses} if self.targets else {}
        with meter.peak(torch.get_default_device()) as peak:
            self.schedule.step(*self.given, **more, return_outputs=False)
        gradients = [parameter.grad.clone() for parameter in self.parameters]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return [loss.item() for loss in losses], gradients, peak.peak_bytes


def same(one: Any, other: Any) -> bool:
    """Whether losses and gradients of two lists of steps are bitwise equal."""
    return all(a[0] == b[0] and all(map(torch.equal, a[1], b[1])) for a, b in zip(one, other, strict=True))


def limited(schedule: str, budgets: list[str]) -> tuple[int, int, list[dict[str, Any]]]:
    """The plain step's peak, that with every block checkpointed, and what steps within budgets do."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    plain, rows = Run(schedule), []
    expected = [plain.step() for _ in range(3)]
    again = Run(schedule, checkpointed=True)
    checkpointed = [again.step() for _ in range(2)][-1][-1]
    for budget in budgets:
        run = Run(schedule)
        handle = lowtide.limit_memory(run.schedule, budget, optimizer=run.optimizer)
        found = [run.step() for _ in range(3)]
        assert handle.plan is not None and handle.graph is not None
        rows.append(
            {
                "budget": budget,
                "same": same(found, expected),
                "limit": handle.plan.budget_bytes,
                "predicted": handle.plan.predicted_peak_bytes,
                "measured": handle.measured_peak_bytes,
                "took": handle.graph.resident_bytes + found[-1][-1],
                "again": len(handle.plan.replayed),
                "step": found[-1][-1],
            }
        )
    return expected[-1][-1], checkpointed, rows


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_all_micro_batches_and_stages_of_a_rank_keep_to_one_budget(schedule: str) -> None:
    budgets = ["min"] if schedule == "interleaved" else ["85%", "min"]
    found = on_ranks(2, limited, schedule, budgets)
    for plain, checkpointed, rows in found:
        for row in rows:
            assert row["same"] and (row["again"] or row["budget"] != "min"), row
            assert row["measured"] == row["took"] == row["predicted"] <= row["limit"], row
        assert rows[-1]["step"] <= checkpointed < plain, rows
    first, second = (rows[0] for _, _, rows in found)
    assert first["again"]  # it has the most in flight, and a percentage is of what it takes
    assert first["limit"] == second["limit"] or first["budget"] == "min"


@pytest.mark.parametrize("schedule", ["zero-bubble", pytest.param("zbv", marks=pytest.mark.slow)])
def test_backwards_in_two_parts_keep_to_the_budget(schedule: str) -> None:
    """The weights' gradients come after the input's, from what was kept or recomputed for both."""
    for plain, _, rows in on_ranks(2, limited, schedule, ["80%"]):
        for row in rows:
            assert row["same"] and row["again"], row
            # a schedule holds gradients of the step before until the next one begins
            assert row["took"] <= row["measured"] <= row["limit"], row
            assert abs(row["measured"] - row["predicted"]) <= 0.01 * row["predicted"], row
        assert rows[-1]["step"] < plain, rows


def shared(way: str) -> list[tuple[bool, int, int, int]]:
    """A stage is shared by two ranks, under FSDP2 or DDP: (same, predicted, measured, budget) of budgets."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place, data = mesh["pp"].get_local_rank(), mesh["dp"]

    def steps(budget: str | None) -> tuple[list[Any], Any]:
        torch.manual_seed(place)
        module: Any = Stage()
        if way == "ddp":
            module = nn.parallel.DistributedDataParallel(module, process_group=data.get_group())
        else:
            for block in (*module.blocks, module):
                fully_shard(block, mesh=data)
        group = mesh["pp"].get_group()
        stage = pipelining.PipelineStage(module, place, 2, torch.device("cpu"), group=group)
        schedule = pipelining.Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(data.get_local_rank())
        x = torch.randn(4 * BATCH, WIDTH, generator=generator)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        handle = None if budget is None else lowtide.limit_memory(schedule, budget, optimizer=optimizer)
        found = []
        for _ in range(3):
            losses: list[Tensor] = []
            more = {"target": x.flip(0), "losses": losses} if place else {}
            schedule.step(*(() if place else (x,)), **more, return_outputs=False)
            gradients = [getattr(p.grad, "_local_tensor", p.grad).clone() for p in module.parameters()]
            found.append(([loss.item() for loss in losses], gradients))
            optimizer.step()
            optimizer.zero_grad()
        return found, handle

    expected, rows = steps(None)[0], []
    for budget in ("85%", "min"):
        found, handle = steps(budget)
        plan = handle.plan
        held = plan.predicted_peak_bytes, handle.measured_peak_bytes, plan.budget_bytes
        rows.append((same(found, expected), *held))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_stages_that_ranks_share_keep_the_budget(way: str) -> None:
    for rows in on_ranks(4, shared, way):
        for bitwise, predicted, measured, budget in rows:
            assert bitwise and 0.99 * predicted <= measured <= predicted <= budget, rows


def on_the_way() -> list[Any]:
    """What a limited schedule does besides: (which operations run again, it can be found, evaluation runs
    plainly, refusals, it is as before once removed).
    """
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    run = Run("1f1b")
    own = run.schedule.step
    handle = lowtide.limit_memory(run.schedule, "85%")
    found = lowtide.handle_of(run.schedule) is handle
    run.step()
    run.step()
    assert handle.plan is not None and handle.graph is not None
    replayed = set(handle.plan.replayed)
    again = [op.index in replayed for op in handle.graph.operations if op.module and op.phase == "forward"]
    plannings = handle.plannings
    with torch.no_grad():
        run.schedule.eval(*run.given, **run.targets)
    refused = []
    for refusing in (
        lambda: handle.prepare(),
        lambda: lowtide.limit_memory(run.schedule, "85%", loss_fn=torch.sum),
    ):
        try:
            refusing()
        except PlanError as error:
            refused.append(str(error))
    handle.remove()
    restored = run.schedule.step == own and "forward_one_chunk" not in vars(run.stages[0])
    return [again, found, plannings == handle.plannings, refused, restored, lowtide.handle_of(run.schedule)]


def test_decisions_differ_by_micro_batch_and_the_limit_comes_off() -> None:
    first, _ = on_ranks(2, on_the_way)
    again, found, plainly, refused, restored, left = first
    size = len(again) // 4
    of_each = {tuple(again[begin : begin + size]) for begin in range(0, len(again), size)}
    assert len(again) == 4 * size and len(of_each) > 1, of_each  # appendix C
    assert found and plainly and restored and left is None
    assert "first schedule.step()" in refused[0] and "loss_fn=" in refused[1]


def validated(schedule: str, with_gradients: bool) -> list[Any]:
    """Steps with evaluations before the first one and between them: (resident bytes, peaks, budget, whether
    losses and gradients are the plain ones, plannings).
    """
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    plain, run = Run(schedule), Run(schedule)
    handle = lowtide.limit_memory(run.schedule, "min", optimizer=run.optimizer)

    def evaluate(of: Run) -> list[float]:
        losses: list[Tensor] = []
        more = {**of.targets, "losses": losses} if of.targets else {}
        with torch.set_grad_enabled(with_gradients):
            of.schedule.eval(*of.given, **more)
        return [loss.item() for loss in losses]

    expected, found, peaks = [], [], []
    for several in ([evaluate, Run.step], [Run.step], [Run.step], [evaluate, Run.step], [evaluate, Run.step]):
        expected.append([one(plain) for one in several])
        with meter.peak(torch.get_default_device()) as peak:
            found.append([one(run) for one in several])
        peaks.append(peak.peak_bytes)
    steps = [[each[-1] for each in rows] for rows in (found, expected)]
    equal = same(*steps) and all(a[0] == b[0] for a, b in zip(found, expected, strict=True) if len(a) > 1)
    assert handle.graph is not None and handle.plan is not None
    return [handle.graph.resident_bytes, peaks, handle.plan.budget_bytes, equal, handle.plannings]


@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("interleaved", marks=pytest.mark.slow)])
def test_a_pipeline_that_validates_keeps_to_its_budget(schedule: str, with_gradients: bool) -> None:
    for resident, peaks, budget, equal, plannings in on_ranks(2, validated, schedule, with_gradients):
        _, _, planned, *after_evaluation = peaks
        assert resident + max(planned, *after_evaluation) <= budget, (resident, peaks, budget)
        assert equal and plannings == 1


def begins() -> tuple[int, int]:
    """What the first step takes, with what the schedule runs before it, and its budget in bytes."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    least = Run("1f1b")
    handle = lowtide.limit_memory(least.schedule, "min", optimizer=least.optimizer)
    least.step()
    least.step()
    assert handle.plan is not None
    run, budget = Run("1f1b"), int(1.1 * handle.plan.budget_bytes)
    lowtide.limit_memory(run.schedule, budget, optimizer=run.optimizer)
    own = sum(one.nbytes for one in (*run.parameters, *run.given, *run.targets.values()))
    return own + run.step()[-1], budget


def test_a_first_step_is_within_its_budget() -> None:
    for took, budget in on_ranks(2, begins):
        assert took <= budget, (took, budget)


def too_small() -> str:
    """The budget of the second rank alone is too small."""
    run = Run("1f1b")
    lowtide.limit_memory(run.schedule, "10KiB" if dist.get_rank() else "100%")
    try:
        run.step()
    except BudgetError as error:
        return str(error)
    return ""


def test_what_one_rank_refuses_fails_on_all() -> None:
    texts = on_ranks(2, too_small)
    assert texts[0] == texts[1] and "budget of 10 KiB" in texts[0]


def moving() -> str:
    """A policy that moves values off the device."""
    run = Run("1f1b")
    lowtide.limit_memory(run.schedule, policy=lowtide.policies.offload("disk", min_bytes=1))
    with pytest.raises(PlanError) as error:
        run.step()
    return str(error.value)


def test_what_moves_values_is_refused() -> None:
    for text in on_ranks(2, moving):
        assert "choose a policy that recomputes" in text
