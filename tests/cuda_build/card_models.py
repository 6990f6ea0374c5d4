"""Models for a card that is not there, and what PyTorch's allocator says of a step."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo

import lowtide
from lowtide import meter
from lowtide.meter.resident import workspace_bytes
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig

ON_THE_CUDA_BUILD = [
    pytest.mark.slow,
    pytest.mark.skipif("NO_CARD_BUILD" not in os.environ, reason="make cuda-build runs it"),
]

CARD = torch.device("cuda:0")
FAMILIES = {family.name: family for family in zoo.FAMILIES}
UNCOMPUTED = (
    *("convnext", "gru", "lstm"),  # the CPU has no kernel for an operation
    *("swin", "t5"),  # the CPU's attention gives a bias no gradient
    *("mamba", "mixtral"),  # Triton's kernels and CUTLASS's grouped products compute nothing
)
"""Families whose bytes alone are known without a card."""

COMPUTED = set(FAMILIES) - {
    *UNCOMPUTED,
    *("deberta", "wav2vec2"),  # how many elements there are depends on values that no kernel has counted
}
"""Families whose operations the CPU's kernels compute."""


def family_on_the_card(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of the zoo in training mode, and its batch."""
    torch.manual_seed(0)
    model, batch = FAMILIES[name].build()
    given = {key: item.to(CARD) if isinstance(item, torch.Tensor) else item for key, item in batch.items()}
    return model.to(CARD).train(), given


def within_a_third(
    model: torch.nn.Module, step: Callable[[], object], verify: Any = "first"
) -> lowtide.Handle:
    """A limit at a third of the way from the smallest peak to the plain one."""
    handle = lowtide.limit_memory(model, "100%", verify=verify)
    step()
    assert handle.plan is not None
    plain = handle.plan.plain_peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowtide.LowtideWarning)
        handle.set_budget("min")
        step()
        handle.set_budget((plain + 2 * handle.plan.predicted_peak_bytes) // 3)
        step()
    return handle


def check_peak(
    handle: lowtide.Handle, model: torch.nn.Module, batch: dict[str, Any], step: Callable[[], object]
) -> None:
    """One more step takes what its plan predicts, by PyTorch's allocator and by lowtide's own meter."""
    peak, plan = taken(model, batch, step), handle.plan
    assert plan is not None and plan.budget_bytes is not None
    assert peak <= plan.budget_bytes
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.001)
    assert handle.measured_peak_bytes == peak


def decoder(
    family: str, layers: int, width: int, positions: int, batch: int, dropout: float = 0.0, on: str = "cuda"
) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A GPT or Llama in training mode and its batch, on a card."""
    torch.manual_seed(0)
    heads = width // 64
    shape = {"hidden_width": 4 * width, "key_value_heads": heads // (2 if family == "llama" else 1)}
    config = ModelConfig(
        family, layers=layers, width=width, heads=heads, positions=positions, dropout=dropout, **shape
    )
    tokens = torch.randint(256, (batch, positions)).to(on)
    return build_model(config).to(on).train(), {"tokens": tokens, "targets": tokens}


def taken(model: torch.nn.Module, batch: dict[str, Any], step: Callable[[], object]) -> int:
    """What a step takes as a plan counts: the model, its inputs, workspaces, and by the allocator's own
    statistics the most that was requested beyond what was resident before.
    """
    given = [item for item in batch.values() if isinstance(item, torch.Tensor)]
    device = given[0].device
    inputs = sum(storage.nbytes() for storage in meter.storages(given))
    resident = meter.resident_bytes(model) + inputs + workspace_bytes(device)
    gc.collect()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_stats(device)["requested_bytes.all.current"]
    step()
    return resident + torch.cuda.memory_stats(device)["requested_bytes.all.peak"] - before
