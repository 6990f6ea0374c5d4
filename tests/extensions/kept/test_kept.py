"""Plans that are kept in a folder: what a later process does with them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_model import Small, batch, needs_meter, small

import lowtide
from lowtide.plan.data import Link

RESTART = Path(__file__).with_name("restart.py")


def run(folder: Path, cases: list[str]) -> dict[str, Any]:
    """What a process of its own saw of all its cases."""
    done = subprocess.run(
        [sys.executable, str(RESTART), str(folder), *cases], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_meter
@pytest.mark.parametrize("cases", [["gpt min"], pytest.param([], marks=pytest.mark.slow)], ids=["one", "all"])
def test_a_restarted_process_plans_for_nothing(tmp_path: Path, cases: list[str]) -> None:
    first, second = run(tmp_path, cases), run(tmp_path, cases)
    assert first.keys() == second.keys()
    for name, case in second.items():
        before = first[name]
        assert case["same_bits"] and before["same_bits"], name
        assert before["profiled"] > 0 and before["plans"] > 0, name
        assert case["profiled"] == 0 and case["solved"] == 0, name
        assert not case["said"], name
        assert case["budget_bytes"] == pytest.approx(before["budget_bytes"], rel=1e-4), name
        over = max(case["peaks"]) - case["budget_bytes"]
        assert over <= 0, (name, over)


# ---- in one process -----------------------------------------------------------------------------------


class Watched:
    """A limited model that keeps plans, what it says, and a plain twin of it."""

    def __init__(
        self,
        folder: Path,
        caplog: pytest.LogCaptureFixture,
        budget: str | int = "60%",
        make: Callable[[], torch.nn.Module] = small,
        **options: Any,
    ) -> None:
        self.model, self.twin, self._caplog = make(), make(), caplog
        self.handle = lowtide.limit_memory(self.model, budget, plans=folder, **options)

    def step(self, rows: int = 100, seed: int = 0, model: torch.nn.Module | None = None) -> None:
        """A step of the limited model, whose bits are those of its twin's."""
        losses = []
        for one in (self.twin, self.model):
            one.zero_grad()
            torch.manual_seed(seed)
            losses.append(one(batch(rows)))
            losses[-1].backward()
        assert torch.equal(*losses)
        both = zip(self.model.parameters(), self.twin.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in both)  # type: ignore[arg-type]

    def steps(self, *rows: int) -> Watched:
        with self._caplog.at_level(logging.INFO, "lowtide"):
            for seed, count in enumerate(rows):
                self.step(count, seed)
        return self

    @property
    def profiled(self) -> int:
        """How many steps were profiled."""
        return sum("profiled" in record.message for record in self._caplog.records)

    def end(self) -> None:
        self.handle.remove()
        self._caplog.clear()


@pytest.fixture
def begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Watched]:
    return lambda *given, **options: Watched(tmp_path, caplog, *given, **options)


def file_of(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


@needs_meter
@pytest.mark.parametrize("budget", ["60%", "min", 190_000])
def test_the_first_step_follows_the_plan(begin: Callable[..., Watched], budget: str | int) -> None:
    one = begin(budget).steps(100, 100)
    assert one.profiled == 1
    plan = one.handle.plan
    one.end()
    other = begin(budget).steps(100)
    assert other.profiled == 0 and other.handle.plan == plan
    assert other.handle.measured_peak_bytes <= other.handle.budget_bytes


@needs_meter
def test_each_size_has_its_plan_again(begin: Callable[..., Watched]) -> None:
    sizes = (60, 100, 100, 100, 60, 80)
    one = begin("min").steps(*sizes)
    assert one.profiled > 1
    plans = one.handle.plans
    one.end()
    other = begin("min").steps(*sizes)
    assert other.profiled == 0 and len(other.handle.plans) == len(plans)
    other.steps(120, 120)
    assert other.profiled == 1


@needs_meter
def test_what_a_run_did_not_come_to_is_kept_for_the_next(begin: Callable[..., Watched]) -> None:
    one = begin().steps(60, 100, 100)
    assert one.profiled == 2
    one.end()
    one = begin().steps(130, 130)
    assert one.profiled == 1
    one.end()
    assert begin().steps(60, 100, 130).profiled == 0


@needs_meter
def test_another_budget_is_planned_for_from_the_profile_that_is_kept(begin: Callable[..., Watched]) -> None:
    one = begin("80%").steps(100, 100)
    before = one.handle.budget_bytes
    one.end()
    other = begin("60%").steps(100)
    assert other.profiled == 0
    assert other.handle.measured_peak_bytes <= other.handle.budget_bytes < before
    other.end()
    assert begin("60%").steps(100).profiled == 0


@needs_meter
def test_a_budget_for_which_no_kept_step_can_be_planned_is_refused_from_a_profile(
    begin: Callable[..., Watched],
) -> None:
    begin().steps(100).end()
    with pytest.raises(lowtide.BudgetError, match="the smallest that works"):
        begin(1 << 14).steps(100)


@needs_meter
def test_a_plan_of_another_policy_is_not_followed(begin: Callable[..., Watched]) -> None:
    begin("90%").steps(100).end()
    other = begin("90%", policy="sqrt").steps(100, 100)
    assert other.profiled == 0 and other.handle.plan.policy == "sqrt"


@needs_meter
def test_the_optimizer_counts_from_the_first_step(begin: Callable[..., Watched], tmp_path: Path) -> None:
    begin().steps(100).end()
    model = small()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = lowtide.limit_memory(model, "60%", plans=tmp_path, optimizer=optimizer)
    model(batch()).backward()
    assert handle.graph is not None and handle.optimizer_bytes > 0
    parameters = sum(p.nbytes for p in model.parameters())
    assert handle.graph.resident_bytes >= handle.optimizer_bytes + parameters


def add_up(model: torch.nn.Module) -> None:
    for _ in range(3):
        model(batch()).backward()


def pair(model: torch.nn.Module) -> None:
    (model(batch()) - 2 * model(batch(80))).square().backward()


def in_bfloat16(model: torch.nn.Module) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch())
    loss.backward()


FAST = {"host": Link(1e15, 1e15)}


@needs_meter
@pytest.mark.parametrize("policy", [None, lowtide.policies.mixed("host", links=FAST, min_bytes=1)])
@pytest.mark.parametrize("step", [add_up, pair, in_bfloat16])
def test_steps_of_many_kinds_are_gone_on_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: Callable[[torch.nn.Module], None], policy: Any
) -> None:
    """Gradients that add up, several forwards, autocast; and values that move."""
    caplog.set_level(logging.INFO, "lowtide")
    for run in range(2):
        twin, model = small(), small()
        handle = lowtide.limit_memory(model, "70%", plans=tmp_path, policy=policy)
        caplog.clear()
        for seed in range(2):
            for one in (twin, model):
                one.zero_grad()
                torch.manual_seed(seed)
                step(one)
            both = zip(model.parameters(), twin.parameters(), strict=True)
            assert all(torch.equal(a.grad, b.grad) for a, b in both)  # type: ignore[arg-type]
            assert handle.measured_peak_bytes <= handle.budget_bytes  # type: ignore[operator]
        assert sum("profiled" in line for line in caplog.messages) == (1 if run == 0 else 0)
        handle.remove()


class Longer(Small):
    """The same modules and parameters, and another forward."""

    more = True

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        x = super().forward(x, scale=scale)
        return (x.exp().sin() * x).cos() if self.more else x


def longer(more: bool) -> torch.nn.Module:
    torch.manual_seed(5)
    model = Longer()
    model.more = more
    return model


@needs_meter
@pytest.mark.parametrize("budget", ["60%", "200%"])
def test_a_step_that_runs_otherwise_is_held_and_profiled_again(
    begin: Callable[..., Watched], budget: str
) -> None:
    begin(budget, lambda: longer(False)).steps(100, 100).end()
    other = begin(budget, lambda: longer(True)).steps(100)
    assert other.profiled == 0
    assert other.handle.measured_peak_bytes <= other.handle.budget_bytes
    other.steps(100, 100)
    assert other.profiled == 1
    other.end()
    assert begin(budget, lambda: longer(True)).steps(100, 100).profiled == 0


# ---- files that are not used -----------------------------------------------------------------------------


def said_of(begin: Callable[..., Watched], *given: Any) -> str:
    """What is said in a run that profiles its first step."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        one = begin(*given).steps(100, 100)
    assert one.profiled == 1
    one.end()
    assert begin(*given).steps(100).profiled == 0, "it has been written anew"
    (found,) = (str(one.message) for one in said)
    return found


@needs_meter
def test_those_of_another_model_are_not_used(begin: Callable[..., Watched]) -> None:
    begin().steps(100).end()
    assert "it is of another model" in said_of(begin, "60%", lambda: small(layers=4))


@needs_meter
@pytest.mark.parametrize("part", ["lowtide", "torch", "device"])
def test_those_of_another_version_or_device_are_not_used(
    begin: Callable[..., Watched], tmp_path: Path, part: str
) -> None:
    begin().steps(100).end()
    file = file_of(tmp_path)
    first, _, rest = file.read_text().partition("\n")
    head = json.loads(first)
    head["made_by"][part] = "0.1"
    file.write_text(f"{json.dumps(head)}\n{rest}")
    assert f"it is of {part} 0.1, not " in said_of(begin)


@needs_meter
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text[:40],
        lambda text: "",
        lambda text: "[]\n" + text,
        lambda text: text.replace("aten.gelu", "aten.relu"),
        lambda text: text.replace('"format": 1', '"format": 2'),
        lambda text: b"\x80\x04\x95" + text.encode(),
    ],
)
def test_damaged_ones_are_not_used(
    begin: Callable[..., Watched], tmp_path: Path, damage: Callable[[str], str | bytes]
) -> None:
    begin().steps(100).end()
    file = file_of(tmp_path)
    left = damage(file.read_text())
    file.write_bytes(left if isinstance(left, bytes) else left.encode())
    text = said_of(begin)
    assert text.startswith(f"the plans in {file} are not used: it") and text.endswith("anew")


@needs_meter
def test_a_folder_that_cannot_be_written_is_said_once(
    begin: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fails)
    with pytest.warns(lowtide.LowtideWarning, match="plans are not kept: .*No space left") as said:
        begin().steps(100, 100, 100, 60, 100)
    assert len(said) == 1


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for given in (file, 3):
        with pytest.raises(lowtide.PlanError, match=r"limit_memory\(plans=\)"):
            lowtide.limit_memory(small(), "60%", plans=given)  # type: ignore[arg-type]


def test_the_compiled_engine_keeps_its_plans_elsewhere(tmp_path: Path) -> None:
    model = torch.compile(small(), backend="aot_eager")
    handle = lowtide.limit_memory(model, "80%", plans=tmp_path)
    model(batch()).backward()
    assert handle.plan is not None and not list(tmp_path.iterdir())


class Checkpointed(Small):
    """Its blocks checkpoint themselves where a trainer has turned this on."""

    gradient_checkpointing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.gradient_checkpointing)
        if self.gradient_checkpointing:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)  # type: ignore
        return super().forward(x)


def checkpointed() -> torch.nn.Module:
    torch.manual_seed(0)
    made = Checkpointed()
    made.seen = []  # type: ignore[assignment]
    return made


def test_checkpointing_that_a_trainer_turns_on_is_off_from_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for restarted in (False, True):
        caplog.clear()
        watched = Watched(tmp_path, caplog, make=checkpointed)
        watched.model.gradient_checkpointing = True  # as a trainer does when it begins
        with pytest.warns(lowtide.LowtideWarning, match="checkpointing"):
            watched.steps(100)
        watched.steps(100, 100)
        assert watched.model.seen == [False] * 3
        assert restarted == (watched.profiled == 0)
        watched.end()
        assert watched.model.gradient_checkpointing is True
