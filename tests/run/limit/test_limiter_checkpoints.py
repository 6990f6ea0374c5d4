"""Models that checkpoint by themselves: the step stays right and within its budget, and is told of once."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from compare import SLACK_BYTES, peak_of, snapshot
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import lowtide

STEPS = 3


class Net(nn.Module):
    """Blocks under ``torch.utils.checkpoint``, and others that are not."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))
            for _ in range(4)
        )
        self.reentrant, self.checkpoints = reentrant, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        for number, block in enumerate(self.blocks):
            again = self.checkpoints and number % 2 == 0
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if again else block(x))
        return x.square().mean()


def steps_of(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Any], list[int]]:
    """What each step leaves, and its peak with all that is resident."""
    left, peaks = [], []
    for seed in range(STEPS):
        model.zero_grad()
        torch.manual_seed(seed)

        def step() -> torch.Tensor:
            output = model(**inputs)
            loss = output if isinstance(output, torch.Tensor) else output.loss
            loss.backward()
            return loss.detach()

        peak, loss = peak_of(step, [model], inputs)
        left.append(snapshot([model, loss]))
        peaks.append(peak)
    return left, peaks


def check(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[str], lowtide.Handle]:
    """Limited to less than it takes, or the smallest budget that works: bitwise, and within budget from the
    second step on. What was said of checkpointing.
    """
    plain, (_, *taken) = steps_of(copy.deepcopy(model), inputs)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        budget = max(taken) * 19 // 20
        handle = lowtide.limit_memory(model, budget)
        try:
            limited, (_, *peaks) = steps_of(model, inputs)
        except lowtide.BudgetError as error:
            assert error.smallest_bytes is not None and error.smallest_bytes <= max(taken)
            handle.set_budget(error.smallest_bytes)
            limited, (_, *peaks) = steps_of(model, inputs)
    assert limited == plain
    assert max(peaks) <= handle.plan.budget_bytes + SLACK_BYTES
    said = [str(one.message) for one in caught if issubclass(one.category, lowtide.LowtideWarning)]
    return [text for text in said if "checkpoint" in text], handle


@pytest.mark.parametrize("reentrant", [False, True])
def test_regions_inside_a_limited_model(reentrant: bool) -> None:
    model = Net(reentrant)
    (said,), handle = check(model, {"x": torch.randn(64, 32).requires_grad_()})
    assert "lowtide decides what is recomputed" in said and "without torch.utils.checkpoint" in said
    assert handle.plan.replayed  # the other blocks are lowtide's
    model.checkpoints = False
    said, _ = check(model, {"x": torch.randn(64, 32).requires_grad_()})
    assert not said


@pytest.mark.usefixtures("quiet_transformers")
@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradient_checkpointing_of_hugging_face(reentrant: bool) -> None:
    """It is off while the limit is on, and what it was in each layer afterwards."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, vocab_size=101, n_positions=64)
    model = transformers.GPT2LMHeadModel(config)
    name = "activation" if hasattr(model, "activation_checkpointing_disable") else "gradient"
    getattr(model, f"{name}_checkpointing_enable")({"use_reentrant": reentrant})
    model.transformer.h[1].gradient_checkpointing = False  # as ``every_n_layers`` leaves it
    before = [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
    model.train()
    tokens = torch.randint(0, 101, (2, 40))
    inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    (said,), handle = check(model, inputs)
    assert "off while its limit is on" in said and "\n" not in said and handle.plan.replayed
    with handle.paused():
        assert before == [getattr(module, "gradient_checkpointing", None) for module in model.modules()]
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    twin = copy.deepcopy(model)
    for one in (model, twin):
        limit = lowtide.handle_of(one)
        assert limit is not None
        limit.remove()
        assert before == [getattr(module, "gradient_checkpointing", None) for module in one.modules()]


class Flagged(nn.Module):
    """As transformers, diffusers and timm have it: a module that checkpoints has a flag."""

    def __init__(self, flag: str) -> None:
        super().__init__()
        self.body = Net(False)
        self.flag = flag
        setattr(self.body, flag, True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body.checkpoints = getattr(self.body, self.flag)
        return self.body(x)


class Switched(nn.Module):
    """With the names that diffusers' models have, and a flag of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Net(False)
        self.enable_gradient_checkpointing()

    def enable_gradient_checkpointing(self) -> None:
        self.body.checkpoints = True

    def disable_gradient_checkpointing(self) -> None:
        self.body.checkpoints = False

    @property
    def is_gradient_checkpointing(self) -> bool:
        return self.body.checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class NoFlag(Net):
    def __init__(self) -> None:
        super().__init__(reentrant=False)
        self.blocks = nn.ModuleList(map(checkpoint_wrapper, self.blocks))
        self.checkpoints = False


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Flagged("gradient_checkpointing"), "off while its limit is on"),
        (lambda: Flagged("grad_checkpointing"), "off while its limit is on"),
        (Switched, "off while its limit is on"),
        (NoFlag, "leave apply_activation_checkpointing out"),
    ],
    ids=["transformers", "timm", "diffusers", "wrapped by PyTorch"],
)
def test_what_a_model_says_of_itself_is_told_when_the_limit_is_set(make: Any, told: str) -> None:
    """Before the first step, and not once more in it."""
    model = make()
    with pytest.warns(lowtide.LowtideWarning, match=told) as caught:
        lowtide.limit_memory(model, "150%")
    assert len(caught) == 1 and caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        model(torch.randn(64, 32).requires_grad_()).backward()


@pytest.mark.parametrize("prepares", [False, True])
def test_checkpointing_that_is_turned_on_under_a_limit_is_off_in_its_first_step(prepares: bool) -> None:
    """A callback of a trainer may begin after the limit's, and turn it on."""
    x = torch.randn(64, 32).requires_grad_()
    model = Switched()
    model.disable_gradient_checkpointing()
    handle = lowtide.limit_memory(model, "min")
    model.enable_gradient_checkpointing()
    with pytest.warns(lowtide.LowtideWarning, match="off while its limit is on"):
        handle.prepare(x) if prepares else model(x).backward()
    assert not model.is_gradient_checkpointing
    assert handle.plan is not None and handle.plan.replayed
    with handle.paused():
        assert model.is_gradient_checkpointing
    assert not model.is_gradient_checkpointing
    handle.remove()
    assert model.is_gradient_checkpointing


def test_a_refused_limit_leaves_a_models_checkpointing_on() -> None:
    model = Flagged("gradient_checkpointing")
    with pytest.raises(lowtide.BudgetError):
        lowtide.limit_memory(model, "60 bananas")
    assert model.body.gradient_checkpointing is True


def test_a_flag_that_is_off_is_not_told_of() -> None:
    model = Flagged("gradient_checkpointing")
    model.body.gradient_checkpointing = False
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        handle = lowtide.limit_memory(model, "100%")
    handle.remove()
    assert model.body.gradient_checkpointing is False


@pytest.mark.parametrize("names", [["gradient"], ["gradient", "activation"]], ids=["old", "new"])
def test_checkpointing_is_turned_off_by_the_name_that_the_model_has(names: list[str]) -> None:
    """transformers 5.23 renamed what was gradient checkpointing, and keeps the old name as deprecated."""
    model = Net(False)
    for name in names:
        setattr(model, f"{name}_checkpointing_disable", lambda: None)
    (said,), _ = check(model, {"x": torch.randn(64, 32).requires_grad_()})
    assert f"call model.{names[-1]}_checkpointing_disable(), and pass {names[-1]}_checkpointing=False" in said
    assert len(names) == 1 or "gradient_checkpointing" not in said


def test_what_is_around_a_limited_model_is_not_its_own() -> None:
    model = Net(False)
    model.checkpoints = False
    lowtide.limit_memory(model, policy="keep_all")
    with warnings.catch_warnings():
        warnings.simplefilter("error", lowtide.LowtideWarning)
        for _ in range(2):
            model.zero_grad()
            checkpoint(model, torch.randn(8, 32).requires_grad_(), use_reentrant=False).backward()


@pytest.mark.filterwarnings("ignore::lowtide.LowtideWarning")
def test_the_smallest_budget_leaves_room_for_what_they_recompute() -> None:
    model = Net(False)
    handle = lowtide.limit_memory(model, "min")
    _, (_, *peaks) = steps_of(model, {"x": torch.randn(64, 32).requires_grad_()})
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert max(peaks) <= handle.plan.budget_bytes + SLACK_BYTES


class Whole(nn.Module):
    """Every block is checkpointed: nothing is left to evict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore
        return x.square().mean()


@pytest.mark.filterwarnings("ignore:this limited model calls torch.utils.checkpoint")
def test_a_hundred_percent_has_room_for_the_random_states_of_checkpoints() -> None:
    """They are in the plain step, too: the whole of it was refused as 101 % of itself."""
    model = Whole()
    handle = lowtide.limit_memory(model, "100%")
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(256, 64)).backward()
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    assert (handle.measured_peak_bytes or 0) <= handle.plan.budget_bytes + SLACK_BYTES
