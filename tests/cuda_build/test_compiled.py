"""The compiled engine with Inductor's Triton kernels for a card: they are compiled, and do nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from card_models import ON_THE_CUDA_BUILD, decoder, taken
from torch._inductor import config
from torch._inductor.codegen.triton import TritonScheduling
from torch.fx.experimental.proxy_tensor import make_fx

import lowtide
from lowtide.private import inductor

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


def test_no_kernel_runs_while_a_cut_is_only_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums along rows and columns in one kernel are tuned by running it: in a lowering that would be on fake
    tensors, whose addresses are nobody's.
    """
    pytest.importorskip("triton")
    ran: list[object] = []

    def measured(*given: object) -> tuple[float, str]:
        ran.append(given)
        return 1.0, ""

    monkeypatch.setattr(TritonScheduling, "benchmark_codegened_module", measured)
    x = torch.empty(32768, 768, device="cuda")
    sums = make_fx(lambda x: [x.sin().sum(0), x.sin().sum(1)], tracing_mode="fake")(x)
    options = {"coordinate_descent_tuning": True}
    text, _ = inductor.generated(sums, False, options)
    assert "call(" in text and not ran
    monkeypatch.setattr(inductor, "_unmeasured", dict)
    inductor.generated(sums, False, options)
    assert ran
