"""``limit_memory(tiles="auto")``: with tiles a budget that no plan meets is held from the first step on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from small_model import needs_meter
from torch import Tensor, nn
from torch.nn import functional as F

import lowtide
from lowtide import Plan
from lowtide import budget as budgets
from lowtide.extensions.tiles.chosen import Tiles
from lowtide.extensions.tiles.tile import tiled_forward
from lowtide.steps.planning import ScriptOptions, trace_and_plan_script
from lowtide.train.errors import OptionError
from lowtide.train.options import TrainOptions
from lowtide.train.planning import PlanOptions, make_plan

WIDTH, TOKENS = 32, 1024

pytestmark = [needs_meter, pytest.mark.filterwarnings("ignore::lowtide.run.messages.LowtideWarning")]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def tokens(length: int = TOKENS) -> Tensor:
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(1))


def step(net: nn.Module, length: int = TOKENS) -> list[Tensor]:
    net.zero_grad()
    loss = net(tokens(length)).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]


def _note(calls: list[int], _: nn.Module, given: tuple[Tensor], __: Tensor) -> None:
    calls.append(given[0].shape[-2])


@pytest.fixture(scope="module")
def smallest() -> int:
    """The smallest budget without tiles."""
    net = model()
    handle = lowtide.limit_memory(net, "min")
    step(net)
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    return handle.plan.budget_bytes


def test_a_budget_that_no_plan_meets_is_held_with_tiles_from_the_first_step(smallest: int) -> None:
    net, budget = model(), int(0.6 * smallest)
    plain = step(copy.deepcopy(net))
    handle = lowtide.limit_memory(net, budget, tiles="auto")
    for _ in range(3):
        for one, other in zip(step(net), plain, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
    assert handle.plan is not None
    notes = "\n".join(handle.plan.notes)
    assert "*.mlp in" in notes and "without tiles: smallest budget" in notes
    tiled = [name for name, one in net.named_modules() if tiled_forward(one) is not None]
    assert tiled == ["0.mlp", "1.mlp"]
    handle.remove()
    assert all(tiled_forward(one) is None for one in net.modules())


def test_choosing_takes_no_more_than_the_budget(smallest: int) -> None:
    net, budget = model(), int(0.6 * smallest)
    weights = sum(one.nbytes for one in net.parameters())
    lowtide.limit_memory(net, budget, tiles="auto")
    assert weights + lowtide.measure(step, net).peak_bytes <= 1.01 * budget


def test_a_refusal_names_tiles_first(smallest: int) -> None:
    net = model()
    lowtide.limit_memory(net, int(0.6 * smallest))
    with pytest.raises(lowtide.BudgetError) as error:
        step(net)
    assert error.value.remedies[0].startswith("use tiles of '*.mlp' (tiles=\"auto\" in limit_memory")


def test_the_smallest_budget_is_smaller_with_tiles() -> None:
    net, found = nn.Sequential(Block()), list[int]()
    for tiles in (None, "auto"):
        handle = lowtide.limit_memory(net, "min", tiles=tiles)
        step(net)
        assert handle.plan is not None and handle.plan.budget_bytes is not None
        found.append(handle.plan.budget_bytes - 2 * sum(p.nbytes for p in net.parameters()))
    assert found[1] < 0.5 * found[0]


def test_choosing_traces_twice_and_foresees_what_the_profile_shows() -> None:
    net, calls = nn.Sequential(*(Block() for _ in range(3))), list[int]()
    net[0].register_forward_hook(partial(_note, calls))
    handle = lowtide.limit_memory(net, "min", tiles="auto")
    step(net)
    assert calls.count(TOKENS) == 3, "two traces, and the step"
    assert handle.plan is not None and handle.plan.budget_bytes is not None
    (tiles,) = (one for one in handle.extensions if isinstance(one, Tiles))
    assert len(tiles.rows) == 2
    assert tiles.rows[1].smallest_bytes == pytest.approx(handle.plan.budget_bytes, rel=0.01)


def test_a_budget_that_a_plan_meets_needs_no_tiles(smallest: int) -> None:
    net = model()
    plain = step(net)
    handle = lowtide.limit_memory(net, smallest, tiles="auto")
    assert all(map(torch.equal, step(net), plain))
    assert handle.plan is not None and not any("tiles" in note for note in handle.plan.notes)
    assert all(tiled_forward(one) is None for one in net.modules())


def test_a_longer_step_gets_more_pieces_and_a_shorter_one_keeps_them(smallest: int) -> None:
    net, budget = model(), int(0.7 * smallest)
    handle = lowtide.limit_memory(net, budget, tiles="auto")
    step(net)
    first = tiled_forward(net[0].mlp)  # pyright: ignore
    assert first is not None
    before = first.tiling.pieces
    for length in (TOKENS + TOKENS // 4, 512):
        step(net, length)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
    assert first.tiling.pieces > before


def test_other_words_are_refused() -> None:
    with pytest.raises(lowtide.PlanError, match=r"limit_memory\(tiles=\)"):
        lowtide.limit_memory(model(), "60%", tiles="all")  # pyright: ignore


def test_sharded_weights_are_refused(one_rank: Callable[[], None]) -> None:
    one_rank()
    net = model()
    torch.distributed.fsdp.fully_shard(net)
    lowtide.limit_memory(net, "60%", tiles="auto")
    with pytest.raises(lowtide.PlanError, match=r"fully_shard gathers.*lowtide\.tile"):
        net(tokens())


def test_a_restart_tiles_the_same_modules_and_traces_nothing(smallest: int, tmp_path: Path) -> None:
    found, budget = list[list[Tensor]](), int(0.6 * smallest)
    for _ in range(2):
        net, calls = model(), list[int]()
        net[0].register_forward_hook(partial(_note, calls))
        handle = lowtide.limit_memory(net, budget, tiles="auto", plans=tmp_path)
        found.append(step(net) + step(net))
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
        assert handle.plan is not None and "*.mlp in" in "".join(handle.plan.notes)
        handle.remove()
    assert calls == [TOKENS] * 2, "two steps, no trace"
    assert all(map(torch.equal, *found))
    net = model()
    handle = lowtide.limit_memory(net, smallest // 2, tiles="auto", plans=tmp_path)
    for _ in range(2):
        step(net)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= smallest // 2


def test_a_plan_made_ahead_has_tiles(smallest: int) -> None:
    net, budget = model(), int(0.6 * smallest)
    handle = lowtide.limit_memory(net, budget, tiles="auto", loss_fn=torch.sum)
    handle.prepare(tokens())
    assert "*.mlp in" in "".join(handle.plan.notes)  # pyright: ignore


def test_a_step_that_fakes_cannot_trace_says_so_and_has_no_tiles() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor) -> Tensor:
            y = self.net(x)
            return y if y.sum().item() > 0 else -y

    net = Branching()
    lowtide.limit_memory(net, "90%", tiles="auto")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(net)
    assert any('tiles="auto" chooses no tiles' in str(one.message) for one in said)


class Language(nn.Module):
    """A small model, and a vocabulary whose logits are the largest tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(4096, WIDTH), model()
        self.head = nn.Linear(WIDTH, 4096, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.tokens(tokens)))
        return F.cross_entropy(logits.flatten(0, -2), tokens.flatten())


def test_where_the_loss_is_the_peak_the_limit_computes_it_in_pieces() -> None:
    torch.manual_seed(0)
    net, words = Language(), torch.randint(4096, (1, 512))
    wanted = net(words)
    wanted.backward()
    gradients = [p.grad.clone() for p in net.parameters()]  # pyright: ignore
    budget = 2 * sum(p.nbytes for p in net.parameters()) + 512 * 4096 * 4 // 2
    net.zero_grad()
    handle = lowtide.limit_memory(net, budget, tiles="auto")
    for _ in range(2):
        net.zero_grad()
        loss = net(words)
        loss.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0.0)
        for parameter, other in zip(net.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, other, rtol=1e-4, atol=1e-6)
        assert handle.measured_peak_bytes is not None and handle.measured_peak_bytes <= budget
    assert handle.plan is not None and any("the loss in" in note for note in handle.plan.notes)
    handle.remove()
    assert "forward" not in net.head.__dict__


class Watched(nn.Module):
    """Its loss has a part that a forward hook collects inside of an MLP, and an output layer in two parts, as
    an adapter makes it.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mlp, self.head = nn.Embedding(4096, WIDTH), MLP(), Adapted()
        self.found: list[Tensor] | None = None
        self.mlp.up.register_forward_hook(self.collect)

    def collect(self, *given: Any) -> None:
        if self.found is not None:
            self.found.append(given[2])

    def forward(self, words: Tensor) -> Tensor:
        found = self.found = []
        logits = self.head(self.mlp(self.words(words)))
        extra, self.found = sum(one.mean((0, 1)).square().sum() for one in found), None
        return F.cross_entropy(logits.flatten(0, 1), words.flatten()) + extra


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 4096, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, 4096, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def test_no_module_is_chosen_that_makes_logits_in_pieces_or_is_watched_inside() -> None:
    net, words = Watched(), torch.randint(4096, (1, TOKENS))
    net(words).backward()
    wanted = [p.grad for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    lowtide.limit_memory(net, "min", tiles="auto")
    net(words).backward()
    for one, other in zip((p.grad for p in net.parameters() if p.grad is not None), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert all(tiled_forward(one) is None for one in (*net.mlp.modules(), *net.head.modules()))


class Outside(Language):
    """Its loss is computed from what it returns."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.tokens(tokens))


def test_a_loss_outside_of_the_model_runs_in_pieces_where_the_limit_is_given_it() -> None:
    words = torch.randint(4096, (1, 512))

    def loss_of(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), words.flatten())

    found = list[lowtide.Handle]()
    for loss_fn in (None, loss_of):
        net = Outside()
        handle = lowtide.limit_memory(net, "min", tiles="auto", loss_fn=loss_fn)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loss_of(net(words)).backward()
        asked = [one for one in said if "limit_memory(loss_fn=)" in str(one.message)]
        assert len(asked) == (loss_fn is None) and not any("in one piece" in str(one.message) for one in said)
        found.append(handle)
    plain, pieces = (handle.plan.budget_bytes for handle in found if handle.plan is not None)
    assert plain is not None and pieces is not None and pieces < 0.5 * plain


# ---- commands ----------------------------------------------------------------------------------------

SCRIPT = """
import torch

def make():
    torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(32, 512), torch.nn.GELU(), torch.nn.Linear(512, 32))
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), mlp)
    return model, (torch.randn(1, 2048, 32),)
"""


def test_lowtide_plan_says_what_tiles_cost(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    asked: dict[str, Any] = {"budget": "min", "tiles": "auto", "plan_seconds": 0.1}
    plans = [
        make_plan(PlanOptions(model="llama-nano", batch=1, seq=512, **asked)),
        trace_and_plan_script(ScriptOptions(f"{script}:make", **asked))[1],
    ]
    for plan in plans:
        without, tiled = [note for note in plan.notes if "smallest budget" in note]
        assert "without tiles: " in without and "pieces: " in tiled
        bytes_of = [
            budgets.parse(note.split("smallest budget ")[1].split(",")[0]) for note in (without, tiled)
        ]
        assert plan.predicted_peak_bytes <= 1.01 * bytes_of[1] < 0.8 * bytes_of[0]
    assert Plan.from_json(plans[0].to_json()).notes == plans[0].notes


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tiles": "auto", "pp": 2, "batch": 8}, "--tiles auto: stages of a pipeline"),
        ({"tiles": "auto", "compile": True}, "leave out --compile"),
        ({"tiles": "auto", "budget": None, "policy": "full"}, "it needs a budget"),
        ({"tiles": "all"}, "choose auto"),
    ],
)
def test_options_that_do_not_go_with_tiles(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        TrainOptions(**given)
