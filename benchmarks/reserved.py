"""What PyTorch's caching allocator reserves on CUDA for steps within a budget, beside what was predicted; and
budgets of reserved bytes, held or not. Ten models.

    python -m benchmarks reserved

It needs a card, or PyTorch's CUDA build without one, whose allocator is the same: see `make cuda-build`, and
``python tests/cuda_build/environment.py .venv-cuda --run benchmarks reserved``.
"""

from __future__ import annotations

import gc
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate

import lowtide
from benchmarks.cases import gpt, llama, resnet
from benchmarks.common import RESULTS, Case, machine
from benchmarks.tables import mib, percent, table
from lowtide import meter
from lowtide.extensions.reserved.card import caching_allocator
from lowtide.meter.resident import workspace_bytes
from lowtide.plan.reserved_bytes import reserved_after

BUDGETS = ("65%", "min")
SHARE = 0.85
"""Of what plain training steps reserve, the budget of reserved bytes."""

STEPS = 10


class Body(nn.Module):
    """Layers whose output's mean square is the loss."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


class Residual(nn.Module):
    """``x`` and what layers make of it."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class Halved(nn.Module):
    """A U-Net's level: convolutions at this size, and within them the next level at half of it."""

    def __init__(self, width: int, inner: nn.Module | None) -> None:
        super().__init__()
        self.down, self.up = nn.Sequential(*_convolved(width), *_convolved(width)), _convolved(2 * width)
        self.out, self.inner = nn.Conv2d(2 * width, width, 1), inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        inner = x if self.inner is None else interpolate(self.inner(avg_pool2d(x, 2)), scale_factor=2)
        return self.out(self.up(torch.cat([x, inner], 1)))


def _convolved(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU())


def _unet() -> nn.Module:
    return Body(nn.Conv2d(3, 32, 3, padding=1), Halved(32, Halved(32, Halved(32, None))))


def _mlp() -> nn.Module:
    width, layers = 1024, 8
    return Body(
        *(
            Residual(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(3 * width, width),
            )
            for _ in range(layers)
        )
    )


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(384, 6, 1536, batch_first=True, dropout=0.0, norm_first=True)
    return Body(nn.TransformerEncoder(layer, 5, enable_nested_tensor=False))


def _images() -> dict[str, Tensor]:
    return {"x": torch.randn(16, 3, 64, 64), "labels": torch.randint(10, (16,))}


def _case(name: str, build: Callable[[], nn.Module], *shape: int) -> Case:
    return Case(name, build, lambda: {"x": torch.randn(*shape)})


MODELS = {
    "GPT": (gpt(6, 768, batch=8, sequence=1024), torch.bfloat16),
    "GPT, wide": (gpt(3, 1536, batch=4, sequence=1024), torch.bfloat16),
    "GPT, dropout": (gpt(5, 512, batch=8, sequence=512, dropout=0.1), torch.bfloat16),
    "GPT, small": (gpt(4, 256, batch=16, sequence=256), torch.bfloat16),
    "Llama": (llama(6, 768, batch=4, sequence=1024), torch.bfloat16),
    "Llama, long": (llama(3, 512, batch=2, sequence=4096), torch.bfloat16),
    "ResNet": (Case("resnet", resnet(8, 128).build, _images), torch.float32),
    "U-Net": (_case("unet", _unet, 16, 3, 128, 128), torch.float32),
    "layers with dropout": (_case("mlp", _mlp, 2048, 1024), torch.float32),
    "encoder": (_case("encoder", _encoder, 8, 512, 384), torch.float32),
}
"""What each is called: the model and its batch, and the parameters' type."""


class Training:
    """Steps of one of `MODELS` on the card, each with a batch of its own; begins with nothing cached.

    Args:
        name: of the model.
        adamw: whether each step ends with AdamW's update.
    """

    def __init__(self, name: str, adamw: bool) -> None:
        case, dtype = MODELS[name]
        self.batch = case.batch
        torch.ones(1, device="cuda", requires_grad=True).mul(2).backward()  # autograd's thread holds a step
        gc.collect()
        torch.cuda.empty_cache()
        self.model = case.build().to("cuda", dtype).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters()) if adamw else None

    def step(self) -> None:
        """One step; gradients are gone when it ends."""
        loss = self.model(**{name: item.to("cuda") for name, item in self.batch().items()})
        getattr(loss, "loss", loss).backward()
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad(set_to_none=True)

    def reserved(self) -> int:
        """The most that is reserved in some steps from now on."""
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            self.step()
        return torch.cuda.max_memory_reserved()


def predicted_row(name: str, budget: str) -> dict[str, Any]:
    """Bytes of a model's steps within a budget of requested bytes."""
    training = Training(name, adamw=False)
    handle = lowtide.limit_memory(training.model, budget, verify="never")
    for _ in range(3):
        training.step()
    torch.cuda.empty_cache()
    card, before = torch.device("cuda"), torch.cuda.memory_stats()["requested_bytes.all.current"]
    allocator, _ = caching_allocator(card)
    plan = handle.plan
    assert plan is not None and handle.graph is not None
    reserved_after(handle.graph, plan.stored, allocator, STEPS)
    row = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_reserved_bytes": allocator.peak_reserved_bytes,
        "reserved_bytes": training.reserved(),
    }
    taken = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    row["requested_bytes"] = meter.resident_bytes(training.model) + workspace_bytes(card) + taken
    handle.remove()
    return row


def held_row(name: str) -> dict[str, Any]:
    """A budget of reserved bytes, AdamW included: a share of what plain steps reserve, or the least that
    lowtide names where that is more.
    """
    training = Training(name, adamw=True)
    for _ in range(2):
        training.step()
    row = {"plain_reserved_bytes": training.reserved()}
    del training
    row["budget_bytes"] = int(SHARE * row["plain_reserved_bytes"])
    try:
        return row | _held(name, row["budget_bytes"])
    except lowtide.BudgetError as refused:
        assert refused.smallest_bytes is not None
        row |= {"budget_bytes": refused.smallest_bytes, "asked_bytes": row["budget_bytes"]}
    return row | _held(name, row["budget_bytes"])


def _held(name: str, budget: int) -> dict[str, int]:
    training = Training(name, adamw=True)
    handle = lowtide.limit_memory(
        training.model, budget, optimizer=training.optimizer, verify="never", reserved=True
    )
    training.step()  # profiled; then the plan was made, and the cache emptied
    try:
        return {"reserved_bytes": training.reserved()}
    finally:
        handle.remove()


def markdown(found: dict[str, Any]) -> str:
    """The results as a page."""
    about = found["machine"]
    predictions = [
        [
            row["model"],
            row["budget"],
            mib(row["predicted_peak_bytes"]),
            mib(row["requested_bytes"]),
            mib(row["predicted_reserved_bytes"]),
            mib(row["reserved_bytes"]),
            percent(row["predicted_reserved_bytes"] / row["reserved_bytes"] - 1),
        ]
        for row in found["predicted"]
    ]
    held = [
        [
            row["model"],
            mib(row["plain_reserved_bytes"]),
            mib(row["budget_bytes"]) + (", the least" if "asked_bytes" in row else ""),
            mib(row["reserved_bytes"]),
            "yes" if row["reserved_bytes"] <= row["budget_bytes"] else "**no**",
        ]
        for row in found["held"]
    ]
    return "\n".join(
        [
            "# Reserved memory",
            "",
            f"{about['date']}, torch {about['torch']}, {found['card']}, lowtide {about['lowtide']}. Made by "
            "`python -m benchmarks reserved`. PyTorch's own caching allocator; MiB.",
            "",
            f"A budget of requested bytes: what the allocator has reserved after {STEPS} steps that begin "
            "with nothing cached, and what lowtide's model of the allocator says beforehand.",
            "",
            table(
                ["model", "budget", "predicted", "requested", "reserved, predicted", "reserved", "off by"],
                predictions,
            ),
            "",
            f"A budget of reserved bytes (`reserved=True`, AdamW counted) of {100 * SHARE:.0f} % of what "
            f"plain steps reserve, or the least that lowtide names; the most of {STEPS} steps after one.",
            "",
            table(["model", "plain steps reserve", "budget", "reserved", "held"], held),
            "",
        ]
    )


def main() -> int:
    if not torch.cuda.is_available():
        print("reserved: needs PyTorch's CUDA build: see benchmarks/reserved.py", file=sys.stderr)
        return 0
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    found: dict[str, Any] = {"machine": machine(), "card": torch.cuda.get_device_name()}
    found |= {"predicted": [], "held": []}
    for name in MODELS:
        for budget in BUDGETS:
            found["predicted"].append({"model": name, "budget": budget, **predicted_row(name, budget)})
            print(found["predicted"][-1], file=sys.stderr, flush=True)
        found["held"].append({"model": name, **held_row(name)})
        print(found["held"][-1], file=sys.stderr, flush=True)
    (RESULTS / "reserved.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "reserved.md").write_text(markdown(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
