"""Codecs: bytes, speed, what they do to gradients, and to 500 steps of training.

python -m benchmarks codecs

Bias and variance are of the whole gradient of a small GPT (after some steps of training) over many draws of
the codec's rounding: with g the exact gradient and g_k the k-th draw, bias = |mean_k g_k - g| / |g| and
deviation = sqrt(mean_k |g_k - mean g|^2) / |g|; a codec without bias has a bias of about deviation /
sqrt(draws).

Two trainings that differ in the last bit drift apart, at a constant rate of 3e-3 by several percent of the
loss, so the rate falls to 0 here, losses are compared for several seeds (of the parameters, the dropout and
the batches), and the row *none* says how far trainings drift that differ by a millionth in one parameter:
nearer than that no codec can be told from none.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.common import RESULTS, save
from lowtide import policies
from lowtide.extensions.moves.store.codec import Form, codec_named
from lowtide.graph import StepGraph
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig
from lowtide.plan.data import Compress, form_and_tier

DRAWS = 40
STEPS = 500
WARM_STEPS = 100
WARM_UP = 50
RATE = 1e-3
SEEDS = (0, 1, 2)
SHAPE = dict(
    family="gpt",
    layers=2,
    width=64,
    heads=2,
    hidden_width=256,
    key_value_heads=2,
    vocabulary=256,
    positions=64,
)
CODECS = ("none", "auto", "bfloat16", "int8", "int4")
LOSSLESS = ("auto",)


def text() -> torch.Tensor:
    """Source of Python's standard library, as bytes."""
    folder = Path(os.__file__).parent
    names = sorted(p for p in folder.glob("*.py"))[:60]
    return torch.tensor(list(b"\n".join(p.read_bytes() for p in names)), dtype=torch.int64)


def policy_of(name: str) -> Any:
    """The policy of a row."""
    return policies.compress(name, min_bytes=1)


def model(seed: int = 0, dropout: float = 0.1) -> torch.nn.Module:
    """A small GPT, the same for a seed."""
    torch.manual_seed(seed)
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


def rate_at(step: int) -> float:
    """Warm-up, then a half cosine down to 0 at the last step: a training that ends, so that two of them can
    be compared.
    """
    return min((step + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / STEPS)))


def trained(
    policy: Any, seed: int = 0, steps: int = STEPS, nudge: float = 0.0
) -> tuple[float, torch.nn.Module]:
    """Mean loss of the last tenth of the steps, and the model."""
    data, net = text(), model(seed)
    if policy is not None:
        lowtide.limit_memory(net, policy=policy)
    with torch.no_grad():
        next(net.parameters()).view(-1)[0] += nudge
    optimizer = torch.optim.AdamW(net.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_at)
    losses = []
    for number in range(seed * STEPS, seed * STEPS + steps):
        torch.manual_seed(number)
        loss = net(**batch(data, number)).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    last = max(1, steps // 10)
    return sum(losses[-last:]) / last, net


def saved_bytes(graph: StepGraph) -> int:
    """All that autograd saves and the step made, each storage once."""
    storages = {graph.values[s.value].storage for s in graph.saved}
    return sum(graph.storages[s].bytes for s in storages if graph.storages[s].producer is not None)


def gradients(name: str) -> dict[str, Any]:
    """What a row's policy compresses, and what that does to the gradient."""
    _, net = trained(None, steps=WARM_STEPS)
    given = batch(text(), 10**6)
    exact = gradient(net, given)
    handle = lowtide.limit_memory(net, policy=policy_of(name))
    draws = torch.stack([gradient(net, given) for _ in range(DRAWS)])
    plan, graph = handle.plan, handle.graph
    assert plan is not None and graph is not None
    moved, encoded = sum(m.bytes for m in plan.moves), sum(m.encoded_bytes for m in plan.moves)
    by_codec: dict[str, list[int]] = {}
    for move in plan.moves:
        first, _ = form_and_tier(move.decision)
        assert isinstance(first, Compress)
        row = by_codec.setdefault(first.codec, [0, 0])
        row[0] += move.bytes
        row[1] += move.encoded_bytes
    whole = saved_bytes(graph)
    mean, size = draws.mean(0), float(exact.norm())
    return {
        "all_saved_bytes": whole,
        "all_saved_bytes_after": whole - moved + encoded,
        "moved_bytes": moved,
        "encoded_bytes": encoded,
        "bytes_by_codec": by_codec,
        "gradient_bias": float((mean - exact).norm()) / size,
        "gradient_deviation": float((draws - mean).square().sum(1).mean().sqrt()) / size,
        "gradient_relative_error": float((draws - exact).norm(dim=1).mean()) / size,
    }


def main(names: tuple[str, ...] = CODECS, seeds: tuple[int, ...] = SEEDS, losses_only: bool = False) -> None:
    """Run and write benchmarks/results/codecs.json; other rows and seeds that stand there stay, and with
    ``losses_only`` what else is in a row.
    """
    torch.set_num_threads(1)
    before = RESULTS / "codecs.json"
    found = json.loads(before.read_text()) if before.exists() else {}
    plain: dict[str, float] = found.get("plain_losses", {})
    rows: dict[str, dict[str, Any]] = {r["codec"]: r for r in found.get("rows", ())}
    for name in names:
        row = rows.setdefault(name, {"codec": name, "lossless": name in LOSSLESS, "losses": {}})
        if name != "none" and not losses_only:
            row.update(speeds(name), **gradients(name))
        for seed in seeds:
            if str(seed) not in plain:
                plain[str(seed)], _ = trained(None, seed)
            loss, _ = trained(policy_of(name), seed) if name != "none" else trained(None, seed, nudge=1e-6)
            row["losses"][str(seed)] = loss
            row["over_plain"] = {s: row["losses"][s] / plain[s] - 1 for s in row["losses"]}
            row["mean_over_plain"] = statistics.mean(row["over_plain"].values())
            row["holds"] = all(abs(over) <= 0.01 for over in row["over_plain"].values())
            print(row, flush=True)
            save(
                "codecs", [rows[n] for n in CODECS if n in rows], draws=DRAWS, steps=STEPS, plain_losses=plain
            )


if __name__ == "__main__":
    main()
