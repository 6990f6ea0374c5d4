"""Models whose ranks share every sequence under a budget: one plan for all ranks, each held to it, and the
same bits as without.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import collectives_at_once, on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import lowtide
from lowtide import meter
from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama

transformers = pytest.importorskip("transformers")
pytestmark = on_each_backend
WIDTH = {"layers": 3, "vocabulary": 64, "positions": 128}
SCALARS = 256  # bytes that a trace does not show


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    own = {"heads": 4, "key_value_heads": 4} if family == "gpt" else {}
    config = preset(f"{family}-nano", **WIDTH, **own, loss_chunks=4)
    return (GPT if family == "gpt" else Llama)(config)


def of_transformers(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64, head_dim=16, bos_token_id=0, eos_token_id=0,
        **({"sliding_window": 40} if kind == "mistral" else {}),
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def make(family: str, exchange: Any) -> nn.Module:
    return lp.context_parallel(build(family), dist.group.WORLD, exchange)


def tokens() -> Tensor:
    return torch.randint(64, (8, 128), generator=seeded(1))


def train(model: nn.Module, steps: int = 4) -> tuple[list[Tensor], list[int]]:
    """Losses and gradients, and the bytes of each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found: list[Tensor] = []
    took, inputs = [], tokens()
    given = {"tokens" if isinstance(model, (GPT, Llama)) else "input_ids": inputs}
    given["targets" if "tokens" in given else "labels"] = inputs
    with collectives_at_once():
        for _ in range(steps):
            with meter.peak(torch.get_default_device()) as seen:
                loss = model(**given).loss
                loss.backward()
            took.append(seen.peak_bytes)
            lp.allreduce_sequence_parallel_gradients(optimizer)
            found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]  # type: ignore
            optimizer.step()
            optimizer.zero_grad()
    return found, took


def limited(family: str, exchange: Any, budgets: list[str]) -> list[dict[str, Any]]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)  # Gloo's threads may let go of buffers late
    expected, plain = train(make(family, exchange))
    found = []
    for budget in budgets:
        model = make(family, exchange)
        handle: Any = lowtide.limit_memory(
            model, **({"policy": "full"} if budget == "full" else {"budget": budget})
        )
        result, took = train(model)
        found.append(
            {
                "budget": budget,
                "same": all(map(torch.equal, expected, result)),
                "program": str(handle.plan.program),
                "again": [handle.graph.operations[i].name for i in handle.plan.replayed],
                "foreseen": handle.plan.predicted_peak_bytes - handle.graph.resident_bytes,
                "left": (handle.plan.budget_bytes or 1 << 40) - handle.graph.resident_bytes,
                "took": took,
                "plain": plain,
            }
        )
    return found


@pytest.mark.parametrize(("family", "exchange"), [("gpt", "ring"), ("llama", "all-to-all")])
def test_one_plan_and_the_same_bits(family: str, exchange: str) -> None:
    for first, second in zip(*on_ranks(2, limited, family, exchange, ["60%", "min", "full"]), strict=True):
        for one in (first, second):
            assert one["same"], f"{one['budget']}: other bits than without a budget"
            assert min(one["took"][-2:]) <= one["left"] + SCALARS, one
        assert first["program"] == second["program"]
        ring = "lowtide_ring.attention.default" in first["again"]
        assert first["again"] and (ring or exchange != "ring" or first["budget"] != "full")


def first_step(family: str) -> tuple[int, int]:
    """What the first step takes under a budget in bytes a little above the smallest, and how much it may."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    model = make(family, "ring")
    smallest: Any = lowtide.limit_memory(model, "min")
    train(model, 1)
    model = make(family, "ring")
    handle: Any = lowtide.limit_memory(model, int(1.05 * smallest.plan.budget_bytes))
    _, took = train(model, 1)
    return took[0], handle.plan.budget_bytes - handle.graph.resident_bytes


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_first_step_of_a_ring_is_held(family: str) -> None:
    for took, left in on_ranks(2, first_step, family):
        assert took <= left + SCALARS


def documents(step: int) -> Tensor:
    """Other documents in each step, and in each row."""
    cuts = torch.randint(1, 100, (8, 1), generator=seeded(step))
    places = torch.arange(128)
    return torch.where(places < cuts, places, places - cuts)


def packed(kind: str, exchange: Any) -> tuple[bool, int]:
    """Whether a limited model of transformers has the bits of one without a limit; how many plans it made."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    found: list[list[Tensor]] = []
    for budget in ("", "75%"):
        model = of_transformers(kind)
        lp.context_parallel(model, dist.group.WORLD, exchange)
        handle = lowtide.limit_memory(model, budget) if budget else None
        own: list[Tensor] = []
        for step in range(4):
            model.zero_grad()
            loss = model(input_ids=tokens(), labels=tokens(), position_ids=documents(step)).loss
            loss.backward()
            lp.allreduce_sequence_parallel_gradients(model)
            own += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        found.append(own)
    assert handle is not None
    return all(map(torch.equal, *found)), len(handle.plans)


@pytest.mark.parametrize(("kind", "exchange"), [("llama", "ring"), ("mistral", "all-to-all")])
def test_packed_documents_that_change(kind: str, exchange: str) -> None:
    for same, plans in on_ranks(2, packed, kind, exchange):
        assert same and plans == 1


def ways(kind: str) -> dict[str, tuple[bool, int, int]]:
    """Of limits that were set before the ranks shared sequences, and of copies: whether the bits are those
    without a limit, the bytes of a step, and how many it may take.
    """
    warnings.simplefilter("ignore", lowtide.LowtideWarning)

    def made() -> nn.Module:
        return build(kind) if kind == "gpt" else of_transformers(kind)

    expected, _ = train(lp.context_parallel(made(), dist.group.WORLD, "ring"))
    found = {}
    for way in ("before", "before and again", "copied", "pickled"):
        model = made()
        if "before" in way:
            lowtide.limit_memory(model, "75%" if way == "before" else "90%")
        lp.context_parallel(model, dist.group.WORLD, "ring")
        if way != "before":
            lowtide.limit_memory(model, "75%")
        if way == "copied":
            model = copy.deepcopy(model)
        elif way == "pickled":
            model = pickle.loads(pickle.dumps(model))
        result, took = train(model)
        handle: Any = lowtide.handle_of(model)
        left = handle.plan.budget_bytes - handle.graph.resident_bytes
        found[way] = all(map(torch.equal, expected, result)), min(took[-2:]), left
    return found


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_limits_set_before_and_copies(kind: str) -> None:
    for found in on_ranks(2, ways, kind):
        for way, (same, took, left) in found.items():
            assert same and took <= left + SCALARS, (way, same, took, left)


class Attends(nn.Module):
    """Attention as PyTorch's context manager exchanges it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).sum()


def in_pytorchs_own() -> str:
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (2,))
    model, x = Attends(), torch.randn(2, 16, 16)
    lowtide.limit_memory(model, "1GiB")
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]), pytest.raises(lowtide.PlanError) as error:
        model(x).backward()
    return str(error.value)


def test_pytorchs_own_context_manager_says_what_to_do() -> None:
    for said in on_ranks(2, in_pytorchs_own):
        assert "lowtide.parallel.context_parallel(model, mesh)" in said
