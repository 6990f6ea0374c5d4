"""`train --compile`: the step compiled within the budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from lowtide import meter
from lowtide.private import inductor
from lowtide.train.options import OptionError, TrainOptions
from lowtide.train.trainer import TrainResult, train


@pytest.fixture(autouse=True)
def _own_code() -> Iterator[None]:
    """No graph compiled before is used, in this process or from the disk."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(inductor.UNCACHED):
        yield


def options(text: Path, **changes: Any) -> TrainOptions:
    small = {
        "model": "gpt-nano",
        "data": text,
        "steps": 4,
        "batch": 4,
        "seq": 32,
        "warmup": 2,
        "eval_every": 0,
        "eval_batches": 1,
        "grad_accum": 2,
        "dropout": 0.1,
        "budget": "85%",
        "compare": False,
        "compile": True,
        "compile_backend": "aot_eager",
    }
    return TrainOptions(**{**small, **changes})


def trail(result: TrainResult) -> list[tuple[float, float]]:
    return list(zip(result.losses, result.gradient_norms, strict=True))


@pytest.mark.skipif(not meter.available(), reason="needs a C++ compiler for the counting allocator")
def test_a_compiled_run_that_is_resumed_is_bitwise_an_eager_one_and_holds_its_budget(
    text: Path, tmp_path: Path
) -> None:
    eager = train(options(text, compile=False, compile_backend=None))
    parts = options(text, checkpoint_dir=tmp_path)
    first = train(dataclasses.replace(parts, stop_after=2))
    second = train(dataclasses.replace(parts, resume=True, budget="90%", compare=True))
    assert trail(first) + trail(second) == trail(eager)
    assert second.validation == eager.validation
    for found in (first, second):
        assert found.plans == 1
        assert max(found.step_peak_bytes[1:]) <= found.budget_bytes, "the first one times operations, too"
    comparison = second.comparison
    assert comparison is not None and comparison.plain is not None
    assert comparison.different == ()
    inputs = 2 * 4 * 32 * 8
    # the comparison counts no inputs; the loss and other scalars are outside the graph
    above = comparison.plan.predicted_peak_bytes - comparison.planned.peak_bytes
    assert abs(above - inputs) <= 64
    assert comparison.planned.peak_bytes < comparison.plain.peak_bytes


@pytest.mark.slow
def test_a_default_budget_is_raised_to_what_works(text: Path) -> None:
    said: list[str] = []

    class Notes:
        def note(self, text: str) -> None:
            said.append(text)

        def __getattr__(self, name: str) -> Any:
            return lambda *args: None

    result = train(options(text, budget="1MiB", raise_budget=True, steps=2), Notes())  # type: ignore
    assert result.budget_bytes is not None and result.budget_bytes > 1 << 20
    assert any("the smallest that works" in line for line in said)


@pytest.mark.slow
def test_inductor_trains_within_the_budget(text: Path) -> None:
    result = train(options(text, compile_backend=None, compare=True, budget="min"))
    assert result.losses[-1] < result.losses[0]
    assert result.comparison is not None and result.comparison.within_budget


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compile": False}, "--compile-backend aot_eager: nothing is compiled: pass --compile"),
        ({"compile_backend": "eager"}, "--compile-backend eager: choose inductor or aot_eager"),
        ({"policy": "mixed"}, "--policy mixed: with --compile, the --budget alone decides"),
        ({"loss_chunks": 4}, "--loss-chunks 4: compiled code computes its loss at once"),
        ({"pp": 2, "grad_accum": 2}, "leave out --pp"),
        ({"optimizer_host_fraction": 0.5}, "leave it out with --compile"),
        ({"compare": True, "report": Path("a.html")}, "--report a.html: a report shows operations"),
        ({"budget": None}, "--compile: it needs a budget"),
    ],
)
def test_what_does_not_go_with_compiled_code_is_refused(
    text: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        options(text, **changes)
