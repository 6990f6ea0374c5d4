"""The compiled engine with Inductor's Triton kernels for a card: they are compiled, and do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from card_models import ON_THE_CUDA_BUILD, decoder, taken
from torch._inductor import config

import lowtide

pytestmark = ON_THE_CUDA_BUILD


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("family", "budget"), [("gpt", "70%"), ("gpt", "50%"), ("llama", "70%")])
def test_a_compiled_step_takes_what_was_predicted(family: str, budget: str) -> None:
    pytest.importorskip("triton")
    model, batch = decoder(family, layers=2, width=256, positions=256, batch=8)
    compiled = lowtide.compile(model, budget)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        compiled(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    for _ in range(2):
        step()
    handle = lowtide.handle_of(compiled)
    peak = taken(model, batch, step)
    assert peak == pytest.approx(handle.predicted_peak_bytes, rel=0.01)
    assert peak <= handle.plan.budget_bytes
