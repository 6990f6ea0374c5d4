"""Codecs: bytes, speed, what they do to gradients, and to 500 steps of training.

python -m benchmarks codecs

Bias and variance are of the whole gradient of a small GPT over many draws of the codec's rounding: with g the exact gradient and g_k the k-th draw,
bias = |mean_k g_k - g| / |g| and deviation = sqrt(mean_k |g_k - mean g|^2) / |g|; a codec without bias has a bias of about deviation / sqrt(draws).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.common import RESULTS, save
from lowtide import policies
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig
from lowtide.store.codec import Form, codec_named

DRAWS = 40
STEPS = 500
SHAPE = dict(family="gpt", layers=2, width=64, heads=2, hidden_width=256, key_value_heads=2, vocabulary=256, positions=64)
CODECS = ("auto", "sparse0.6", "bfloat16", "int8", "int4")


def text() -> torch.Tensor:
    """Source of Python's standard library, as bytes."""
    folder = Path(os.__file__).parent
    names = sorted(p for p in folder.glob("*.py"))[:60]
    return torch.tensor(list(b"\n".join(p.read_bytes() for p in names)), dtype=torch.int64)


def model(dropout: float = 0.1) -> torch.nn.Module:
    """A small GPT, always the same."""
    torch.manual_seed(0)
    return build_model(ModelConfig(**SHAPE, dropout=dropout)).train()  # type: ignore[arg-type]


def batch(data: torch.Tensor, number: int, size: int = 8) -> dict[str, torch.Tensor]:
    """The ``number``-th batch, always the same."""
    source = torch.Generator().manual_seed(number)
    starts = torch.randint(len(data) - 65, (size,), generator=source)
    rows = torch.stack([data[s : s + 65] for s in starts])
    return {"tokens": rows[:, :-1].contiguous(), "targets": rows[:, 1:].contiguous()}


def gradient(net: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """All gradients, flat."""
    net.zero_grad()
    torch.manual_seed(1)
    net(**given).loss.backward()
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def speeds(name: str) -> dict[str, Any]:
    """Bytes and seconds of the codec itself on a million normal numbers, half of them zero."""
    codec = codec_named("mask" if name == "auto" else name)
    x = torch.randn(1 << 20)
    x = torch.where(torch.rand(1 << 20) < 0.5, x, torch.zeros(()))
    if name == "auto":
        x = (x != 0).float()
    out = torch.empty_like(x)
    codec.decode(codec.encode(x), out)
    begin = time.perf_counter()
    for _ in range(5):
        parts = codec.encode(x)
    middle = time.perf_counter()
    for _ in range(5):
        codec.decode(parts, out)
    end = time.perf_counter()
    return {
        "bytes_ratio": codec.encoded_bytes(Form(x.numel(), x.dtype)) / x.nbytes,
        "encode_bytes_per_second": 5 * x.nbytes / (middle - begin),
        "decode_bytes_per_second": 5 * x.nbytes / (end - middle),
        "value_relative_error": float((out - x).norm() / x.norm()),
    }


def trained(policy: Any) -> float:
    """Mean loss of the last 50 of 500 steps."""
    data, net = text(), model()
    if policy is not None:
        lowtide.limit_memory(net, policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    losses = []
    for number in range(STEPS):
        torch.manual_seed(number)
        loss = net(**batch(data, number)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return sum(losses[-50:]) / 50


def main(names: tuple[str, ...] = CODECS) -> None:
    """Run and write benchmarks/results/codecs.json; rows of other codecs that stand there stay."""
    torch.set_num_threads(1)
    before = RESULTS / "codecs.json"
    rows = [r for r in json.loads(before.read_text())["rows"] if r["codec"] not in names] if before.exists() else []
    data = text()
    given = batch(data, 0)
    exact = gradient(model(), given)
    plain_loss = trained(None)
    for name in names:
        policy = policies.compress(name, min_bytes=1)
        net = model()
        handle = lowtide.limit_memory(net, policy=policy)
        draws = torch.stack([gradient(net, given) for _ in range(DRAWS)])
        plan = handle.plan
        assert plan is not None
        mean = draws.mean(0)
        size = float(exact.norm())
        loss = trained(policy)
        rows.append(
            {
                "codec": name,
                **speeds(name),
                "lossless": name in ("auto", "sparse0.6"),
                "saved_bytes": sum(m.bytes for m in plan.moves),
                "compressed_bytes": sum(m.encoded_bytes for m in plan.moves),
                "gradient_bias": float((mean - exact).norm()) / size,
                "gradient_deviation": float((draws - mean).square().sum(1).mean().sqrt()) / size,
                "gradient_relative_error": float((draws - exact).norm(dim=1).mean()) / size,
                "loss_after_500": loss,
                "plain_loss_after_500": plain_loss,
                "holds": abs(loss / plain_loss - 1) <= 0.01,
            }
        )
        print(rows[-1], flush=True)
        handle.remove()
        save("codecs", rows, draws=DRAWS, steps=STEPS)


if __name__ == "__main__":
    main()
