"""Models that are no decoder, and other ways to compute attention: gradients and memory within a budget."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import lowtide
from benchmarks.gpu.rows import Row, Unmeasured, Where
from benchmarks.gpu.training import allocator_peaks, case_of, compared, gradients, placed
from lowtide.meter.resident import workspace_bytes

Built = tuple[nn.Module, dict[str, Any], str]
"""A model whose call returns the loss, what it is called with, and the budget."""

DROPOUT = 0.1


class Images(nn.Module):
    """Residual convolutions with batch normalisation."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        """The loss of images of shape (batch, 3, height, width) with classes of shape (batch,)."""
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = torch.relu(hidden + block(hidden))
        return functional.cross_entropy(self.head(hidden.mean((2, 3))), classes)


class Sequences(nn.Module):
    """Several LSTM layers with dropout between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(width, width, layers, batch_first=True, dropout=DROPOUT)
        self.mix = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss of sequences of shape (batch, time, width)."""
        hidden, _ = self.layers(hidden)
        return torch.tanh(self.mix(torch.tanh(hidden))).square().mean()


class WithKernel(nn.Module):
    """Layers whose activation is a Triton kernel in a function of its own."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        from benchmarks.gpu.kernel import Squared

        self.activation = Squared.apply
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The loss of rows of shape (batch, width)."""
        for layer in self.layers:
            hidden = torch.tanh(self.activation(layer(hidden)))
        return hidden.square().mean()


def _images(where: Where) -> Built:
    if not where.card:
        raise Unmeasured("cuDNN needs a card")
    torch.backends.cudnn.benchmark = True
    width, blocks, batch, side = (8, 3, 2, 16) if where.small else (128, 8, 64, 64)
    images, classes = torch.randn(batch, 3, side, side), torch.randint(10, (batch,))
    return Images(width, blocks), {"images": images, "classes": classes}, "70%"


def _sequences(where: Where) -> Built:
    if not where.card:
        raise Unmeasured("cuDNN needs a card")
    width, layers, batch, time = (32, 2, 2, 16) if where.small else (1024, 4, 64, 512)
    return Sequences(width, layers), {"hidden": torch.randn(batch, time, width)}, "min"


def _kernel(where: Where) -> Built:
    if where.device == "cpu":
        raise Unmeasured("a Triton kernel needs a card")
    width, layers, batch = (64, 3, 64) if where.small else (2048, 8, 16384)
    return WithKernel(width, layers), {"hidden": torch.randn(batch, width)}, "70%"  # its results stay


def _attention(kind: str, dropout: float) -> Callable[[Where], Built]:
    """GPT whose attention is one of PyTorch's implementations."""

    def build(where: Where) -> Built:
        if where.device == "cpu" and kind == "efficient":
            raise Unmeasured("this attention needs a card")
        torch.backends.cuda.enable_flash_sdp(kind == "flash")
        torch.backends.cuda.enable_mem_efficient_sdp(kind == "efficient")
        torch.backends.cuda.enable_math_sdp(kind == "math")
        torch.backends.cuda.enable_cudnn_sdp(kind == "cudnn")
        model, batch = placed(case_of("gpt", where, batch=4, dropout=dropout), where)
        return model, batch, "60%"

    return build


KINDS: dict[str, Callable[[Where], Built]] = {
    "convolutions, cudnn.benchmark": _images,
    "LSTM": _sequences,
    "Triton kernel": _kernel,
    "GPT, efficient attention": _attention("efficient", 0.0),
    "GPT, efficient, dropout": _attention("efficient", DROPOUT),
    "GPT, flash, dropout": _attention("flash", DROPOUT),
    "GPT, math, dropout": _attention("math", DROPOUT),
}


def kind_row(name: str, where: Where) -> Row:
    """Four steps within a budget against the plain step, and what the last ones take.

    Args:
        name: one of `KINDS`.
        where: on what.
    """
    beside = resident_bytes(where)
    torch.manual_seed(0)
    built, batch, budget = KINDS[name](where)
    model = built.to(where.device)
    batch = {key: value.to(where.device) for key, value in batch.items()}

    def step() -> None:
        torch.manual_seed(2)
        model.zero_grad(set_to_none=True)
        loss = model(**batch)
        getattr(loss, "loss", loss).backward()

    for _ in range(2):  # statistics of batches move on with every step, and change no gradient
        step()
    exact, again = gradients(model), []
    for _ in range(4):
        step()
        again.append(compared(exact, model))
    handle = lowtide.limit_memory(model, budget)
    bits = []
    for _ in range(4):
        step()
        bits.append(compared(exact, model))
    model.zero_grad(set_to_none=True)
    plan = handle.plan
    assert plan is not None
    return {
        "same_gradients": all(bit["same_gradients"] for bit in bits),
        "largest_difference": max(bit["largest_difference"] for bit in bits),
        "plain_repeats": all(bit["same_gradients"] for bit in again),
        "plain_difference": max(bit["largest_difference"] for bit in again),
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "plan_plain_bytes": plan.plain_peak_bytes,
        "replays": len(plan.replayed),
        "kept": handle.kept,
        "beside_bytes": beside,
        **(allocator_peaks(step, handle) if where.device == "cuda" else {}),
    }


def resident_bytes(where: Where) -> int:
    """What the rows before have left on a card, such as the random numbers' state that cuDNN keeps for the
    dropout of an LSTM; less the workspaces, which every plan counts.
    """
    if where.device == "cpu":
        return 0
    gc.collect()
    torch.ones(1, device="cuda", requires_grad=True).mul(2).backward()  # autograd's thread holds a step
    here = torch.device("cuda")
    live = torch.cuda.memory_stats(here)["requested_bytes.all.current"] - workspace_bytes(here)
    return max(0, live)


def expandable_row(name: str, where: Where) -> Row:
    """A budget with expandable segments, which the allocator reads from the environment.

    Args:
        name: the budget.
        where: on what.
    """
    if where.device == "cpu":
        raise Unmeasured("needs a CUDA device")
    if not where.card:
        raise Unmeasured("needs a card's driver, which maps the segments")
    if "expandable_segments:True" not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
        raise RuntimeError("PYTORCH_ALLOC_CONF does not ask for expandable segments")
    model, batch = placed(case_of("gpt", where), where)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(**batch).loss.backward()

    handle = lowtide.limit_memory(model, name.replace(" ", ""))
    for _ in range(3):
        step()
    model.zero_grad(set_to_none=True)
    plan = handle.plan
    assert plan is not None
    return {"predicted_peak_bytes": plan.predicted_peak_bytes, **allocator_peaks(step, handle)}
