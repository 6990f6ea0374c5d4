"""A step on fake tensors branches on integers and booleans as the real step does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide import BudgetError, TraceError
from lowtide.graph import StepGraph
from lowtide.plan.simulate import plain
from lowtide.trace.contents import LIMIT_BYTES

TOKENS = 256
CONFIG: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def names(graph: StepGraph) -> list[str]:
    return [o.name for o in graph.operations if o.phase == "forward"]


def smallest(graph: StepGraph) -> int:
    with pytest.raises(BudgetError) as caught:
        lowtide.plan(graph, 1)
    assert caught.value.smallest_bytes is not None
    return caught.value.smallest_bytes


def both(step: Callable[..., Any], *args: Any, **options: Any) -> list[StepGraph]:
    return [lowtide.trace(step, *args, fake=fake, costs=False, **options) for fake in (True, False)]


def ones() -> dict[str, torch.Tensor]:
    return {"attention_mask": torch.ones(2, TOKENS, dtype=torch.long)}


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, : TOKENS // 4] = 0
    return {"attention_mask": mask}


def packed() -> dict[str, torch.Tensor]:
    return {"position_ids": torch.arange(TOKENS // 2).repeat(2).expand(2, -1)}


def llama(transformers: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG))


def mistral(transformers: Any) -> Any:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**CONFIG, sliding_window=TOKENS // 4))


@pytest.mark.parametrize(
    ("make", "extra"),
    [(llama, dict), (llama, ones), (llama, padded), (llama, packed), (mistral, ones)],
)
def test_decoders_of_transformers_take_what_the_real_step_takes(
    make: Callable[[Any], Any], extra: Callable[[], dict[str, torch.Tensor]]
) -> None:
    model = make(pytest.importorskip("transformers"))
    ids, given = torch.randint(3, 60, (2, TOKENS)), extra()

    def step() -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False, **given)

    fake, real = both(step, model=model)
    assert names(fake) == names(real)
    assert smallest(fake) == pytest.approx(smallest(real), rel=0.01)
    peaks = [max(plain(graph).top_bytes) for graph in (fake, real)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


class Asking(nn.Module):
    """Runs as often as its integers say."""

    def __init__(self, ask: Callable[[torch.Tensor], int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.ask = ask

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for _ in range(self.ask(ids) * int(self.calls)):
            x = self.linear(x)
        return x.sum()


def through_a_view(ids: torch.Tensor) -> int:
    shifted = ids.new_zeros(ids.shape)
    shifted[1:] = ids[:-1]
    row = shifted[2:3]
    shifted.add_(1)
    return int(row)


@pytest.mark.parametrize(
    "ask",
    [
        lambda ids: ids.max().item(),
        lambda ids: len(ids.tolist()) - 1,
        lambda ids: 2 if (ids == 3).any() else 1,
        lambda ids: len(ids.nonzero()),
        lambda ids: len(ids[ids > 1]),
        lambda ids: int((torch.arange(4, device=ids.device) < ids).sum()) + 1,
        lambda ids: torch.zeros(7)[ids > 0].shape[0] if len(ids) == 7 else int(ids.unique().numel()),
        through_a_view,
    ],
)
def test_integers_are_asked_for_and_stay_as_they_are(ask: Callable[[torch.Tensor], int]) -> None:
    model, ids = Asking(ask), torch.tensor([0, 1, 2, 3])
    fake, real = both(model, torch.ones(2, 4), ids)
    assert names(fake).count("aten.addmm.default") == names(real).count("aten.addmm.default") > 0
    assert int(model.calls) == 0
    assert ids.tolist() == [0, 1, 2, 3]


def test_elements_that_a_known_mask_takes() -> None:
    labels = torch.tensor([1, -100, 2, -100, 3])

    def step(x: torch.Tensor) -> torch.Tensor:
        taken = x.exp()[labels != -100]
        assert taken.shape == (3, 4)
        return taken.sum()

    fake, real = both(step, torch.ones(5, 4, requires_grad=True))
    assert names(fake) == names(real)


def overwritten(x: torch.Tensor) -> Any:
    chosen = torch.zeros(4, dtype=torch.long)
    view = chosen[1:]
    chosen.copy_(x.argsort())
    return view.max().item()


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x.argmax().item(),
        lambda x: x.long().tolist(),
        lambda x: torch.randint(4, (1,)).item(),
        lambda x: torch.zeros(LIMIT_BYTES + 1, dtype=torch.bool).any().item(),
        overwritten,
    ],
)
def test_values_that_are_not_known_are_refused(ask: Callable[[torch.Tensor], Any]) -> None:
    model = nn.Linear(4, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        ask(x)
        return model(x).sum()

    with pytest.raises(TraceError, match="DataDependentOutputException"):
        lowtide.trace(step, torch.ones(4), costs=False, fake=True)
