"""What is given wrongly is refused at once: what was given, what is allowed, in the words of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lowtide
from lowtide import estimate, meter, optim, parallel
from lowtide.errors import LowtideError
from lowtide.plan import policies

X = torch.randn(2, 4)
MODEL = torch.nn.Linear(4, 1)
GIVEN: Any = "nonsense"


def ones(*_: Any) -> torch.Tensor:
    return torch.ones(3)


def prepared() -> Any:
    return lowtide.limit_memory(MODEL, "60%").prepare_all(GIVEN)


WRONG: dict[str, Callable[[], Any]] = {
    "measure(step=)": lambda: lowtide.measure(GIVEN),
    "measure(repeats=)": lambda: lowtide.measure(ones, repeats=GIVEN),
    "measure(warmup=)": lambda: lowtide.measure(ones, warmup=GIVEN),
    "measure(device=)": lambda: lowtide.measure(ones, device=GIVEN),
    "peak(device=)": lambda: meter.peak(GIVEN),
    "resident_bytes(model=)": lambda: meter.resident_bytes(GIVEN),
    "resident_bytes(optimizer=)": lambda: meter.resident_bytes(MODEL, GIVEN),
    "resident_bytes(device=)": lambda: meter.resident_bytes(MODEL, device=GIVEN),
    "checkpoint": lambda: lowtide.checkpoint(GIVEN, X),
    "trace(model=)": lambda: lowtide.trace(ones, model=GIVEN),
    "apply(stores=)": lambda: lowtide.apply(
        lowtide.plan(lowtide.trace(lambda: MODEL(X).sum()), policy="keep_all"), stores=GIVEN
    ),
    "prepare_all": prepared,
    "layout(capacity=)": lambda: lowtide.layout([0], [1], [4], capacity=GIVEN),
    "layout(align=)": lambda: lowtide.layout([0], [1], [4], align=GIVEN),
    "layout(seconds=)": lambda: lowtide.layout([0], [1], [4], seconds=GIVEN),
    "measure_links(stores=)": lambda: lowtide.measure_links("int8", stores=GIVEN),
    "measure_links(device=)": lambda: lowtide.measure_links("int8", device=GIVEN),
    "Compress(codec=)": lambda: lowtide.Compress(3),  # type: ignore[arg-type]
    "Shard(size=)": lambda: lowtide.Shard("group", GIVEN),
    "Chain(first=)": lambda: lowtide.Chain(GIVEN, lowtide.Offload()),
    "Chain(then=)": lambda: lowtide.Chain(lowtide.Compress("int8"), GIVEN),
    "Stores(codecs=)": lambda: lowtide.Stores(codecs=GIVEN),
    "offload(min_bytes=)": lambda: policies.offload(min_bytes=GIVEN),
    "mixed(window_bytes=)": lambda: policies.mixed(window_bytes=GIVEN),
    "mixed(links=)": lambda: policies.mixed(links=GIVEN),
    "compress(codec=)": lambda: policies.compress(None),  # type: ignore[arg-type]
    "compress(then=)": lambda: policies.compress(then=GIVEN),
    "sqrt(segments=)": lambda: policies.sqrt(GIVEN),
    "scope(modules=)": lambda: policies.scope(GIVEN),
    "compile(options=)": lambda: lowtide.compile(MODEL, "60%", options=GIVEN),
    "compile(tiers=)": lambda: lowtide.compile(MODEL, "60%", tiers=3),  # type: ignore[arg-type]
    "compile(codecs=)": lambda: lowtide.compile(MODEL, "60%", codecs=3),  # type: ignore[arg-type]
    "HostOptimizer(params=)": lambda: optim.HostOptimizer(torch.optim.AdamW, GIVEN),
    "HostOptimizer(link=)": lambda: optim.HostOptimizer(torch.optim.AdamW, MODEL.parameters(), link=GIVEN),
    "HostOptimizer(delay_after=)": lambda: optim.HostOptimizer(
        torch.optim.AdamW, MODEL.parameters(), delay_after=GIVEN
    ),
    "HostOptimizer(chunk_bytes=)": lambda: optim.HostOptimizer(
        torch.optim.AdamW, MODEL.parameters(), chunk_bytes=GIVEN
    ),
    "parallelize": lambda: parallel.parallelize(GIVEN),
    "whole_state_dict": lambda: parallel.whole_state_dict(GIVEN),
    "mark_partial_gradients": lambda: parallel.mark_partial_gradients(GIVEN),
    "allreduce_sequence_parallel_gradients": lambda: parallel.allreduce_sequence_parallel_gradients(GIVEN),
    "estimate": lambda: estimate.estimate(GIVEN),
    "iteration_flops": lambda: estimate.iteration_flops(GIVEN),
    "model_states": lambda: estimate.model_states(GIVEN),
    "utilization": lambda: estimate.utilization(1, GIVEN, 1, 1.0),
    "from_hugging_face": lambda: estimate.from_hugging_face(GIVEN),
    "read_config": lambda: estimate.read_config(3),  # type: ignore[arg-type]
    "configure": lambda: estimate.configure(3),  # type: ignore[arg-type]
    "preset": lambda: estimate.preset(3),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(LowtideError, match=r"was given .*: give ") as refused:
        WRONG[name]()
    assert "nonsense" in str(refused.value) or " 3:" in str(refused.value) or "None:" in str(refused.value)
