"""What the first step under a limit takes: the profiled step and the search beside a plain step, and the
profiled step's peak over the budget that later steps keep.

python -m benchmarks first_step [--quick] [--resume]

Small models, whose steps take 10 ms to a second: there the first step is felt. Every time is a median over
fresh models, each planned for once; `--quick` takes one. The process has planned another model before, so
what the first plan of a process imports is not in them. Processor time is taken, of all threads: other
processes count only by the caches and cores that they share.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.cases import WithLoss, gpt
from benchmarks.common import Case, kept_rows, quick, run_key, save, step_of, total_peak
from lowtide import limit_memory
from lowtide.plan.search import search_of
from lowtide.run.limit.planning import PlanMaker

BUDGETS = ("70%", "min")
PLAIN_FACTOR, OPERATION_SECONDS = 3.0, 50e-6
"""What a profiled step may take: so many plain ones, and so much an operation."""

SEARCH_FACTOR, SEARCH_SECONDS, MINIMUM_SECONDS = 10.0, 1.0, 5.0
"""What a search may take: so many plain steps or so many seconds, and for ``"min"`` so many."""


class Basic(nn.Module):
    """ResNet-18's block."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.short = (
            nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))
            if before != width or stride > 1
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norms[0](self.first(x)))
        return torch.relu_(self.norms[1](self.second(h)) + self.short(x))


def resnet18() -> Case:
    """ResNet-18 for small images, half as wide."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        widths = (32, 64, 128, 256)
        body: list[nn.Module] = [nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True)]
        for before, width in zip((32, *widths), widths, strict=False):
            body += [Basic(before, width, 1 if before == width else 2), Basic(width, width, 1)]
        return WithLoss(
            nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
        ).train()

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        return {"x": torch.randn(32, 3, 32, 32), "labels": torch.randint(10, (32,))}

    return Case("resnet-18", build, batch)


class Summed(nn.Module):
    """A model and the mean of its output's squares as the loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Any:
        """The loss, as an output with ``.loss``."""
        out = self.body(x)
        return SimpleNamespace(loss=(out[0] if isinstance(out, tuple) else out).square().mean())


class Chain(nn.Module):
    """Tiny operations one after the other, without any structure."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.weight = length, nn.Parameter(torch.ones(64))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.length):
            x = torch.sin(x * self.weight)
        return x


class OverDepth(nn.Module):
    """Every layer reads all layers before it, by an attention over depth."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.queries = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(2 * layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(2 * layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for query, norm, part in zip(self.queries, self.norms, self.parts, strict=True):
            values = torch.stack(seen)
            shares = torch.einsum("d,nbtd->nbt", query, norm(values)).softmax(0)
            seen.append(part(torch.einsum("nbt,nbtd->btd", shares, values)))
        return seen[-1]


class Recurrent(nn.Module):
    """RWKV's recurrence, a few operations for each token of each layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.outs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.decays = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for part, last, decay in zip(self.parts, self.outs, self.decays, strict=True):
            r, k, v = part(x).chunk(3, -1)
            above = below = torch.zeros_like(x[:, 0])
            steps, slow = [], torch.exp(-torch.exp(decay))
            for t in range(x.shape[1]):
                weight = torch.exp(k[:, t])
                above, below = slow * above + weight * v[:, t], slow * below + weight
                steps.append(torch.sigmoid(r[:, t]) * above / below)
            x = x + last(torch.stack(steps, 1))
        return x


def summed(name: str, build: Callable[[], nn.Module], *shape: int) -> Case:
    """A case of a model of ours on random numbers."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return Summed(build()).train()

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        return {"x": torch.randn(*shape)}

    return Case(name, made, batch)


def qwen_lora() -> Case:
    """A mixture of experts of Hugging Face with LoRA on its attention."""

    def build() -> nn.Module:
        import peft
        import transformers

        torch.manual_seed(0)
        config = transformers.Qwen2MoeConfig(
            vocab_size=1024,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts=8,
            num_experts_per_tok=2,
            use_cache=False,
        )
        lora = peft.LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
        return peft.get_peft_model(transformers.Qwen2MoeForCausalLM(config), lora).train()

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(1000, (4, 128))
        return {"input_ids": ids, "labels": ids}

    return Case("qwen mixture 4x128, lora", build, batch)


def cases() -> list[Case]:
    """The models."""
    return [
        replace(gpt(4, 128, batch=8, sequence=64), name="gpt 4x128"),
        resnet18(),
        summed("chain of 1,600", lambda: Chain(800), 8, 64),
        qwen_lora(),
        summed("attention over depth, 12 layers", lambda: OverDepth(12, 64), 2, 64, 64),
        summed("rwkv 2 layers, 96 tokens", lambda: Recurrent(2, 64), 4, 96, 64),
        summed("gru, 128 tokens", lambda: nn.GRU(64, 64, batch_first=True), 8, 128, 64),
    ]


class _Clocked:
    """Adds up the seconds that plans take, while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> _Clocked:
        self._plan = plan = PlanMaker.make

        def timed(*args: Any) -> Any:
            begin = time.process_time()
            try:
                return plan(*args)
            finally:
                self.seconds += time.process_time() - begin

        PlanMaker.make = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        PlanMaker.make = self._plan  # type: ignore[method-assign]


def row_of(case: Case, budget: str, rounds: int) -> dict[str, Any]:
    """One row: medians over ``rounds`` models."""
    found: list[dict[str, float]] = []
    operations = 0
    for _ in range(rounds):
        model, batch = case.build(), case.batch()
        step = step_of(model, batch)
        step()
        plain = statistics.median(_seconds(step) for _ in range(5))
        search_of.cache_clear()
        model.zero_grad(set_to_none=True)
        handle = limit_memory(model, budget=budget)
        with _Clocked() as searched:
            first: list[float] = []
            peak = total_peak(model, batch, lambda s=step, f=first: f.append(_seconds(s)))
        graph, plan = handle.graph, handle.plan
        assert graph is not None and plan is not None and plan.budget_bytes is not None
        operations = len(graph.operations)
        found.append(
            {
                "plain_seconds": plain,
                "profiled_seconds": first[0] - searched.seconds,
                "search_seconds": searched.seconds,
                "peak_over_budget": peak / plan.budget_bytes,
                "gap": plan.gap,
                "extra": plan.predicted_extra_seconds / plan.plain_seconds,
            }
        )
        handle.remove()
    row: dict[str, Any] = {"model": case.name, "run": run_key(), "budget": budget, "operations": operations}
    row |= {name: statistics.median(one[name] for one in found) for name in found[0]}
    allowed = PLAIN_FACTOR * row["plain_seconds"] + OPERATION_SECONDS * operations
    longest = max(SEARCH_FACTOR * row["plain_seconds"], SEARCH_SECONDS)
    row["profiled_over_allowed"] = row["profiled_seconds"] / allowed
    row["search_over_allowed"] = row["search_seconds"] / (MINIMUM_SECONDS if budget == "min" else longest)
    print(
        f"{case.name} at {budget}: {operations:,} operations, plain {1e3 * row['plain_seconds']:.0f} ms, "
        f"profiled {1e3 * row['profiled_seconds']:.0f} ms ({row['profiled_over_allowed']:.2f} of allowed), "
        f"search {row['search_seconds']:.2f} s ({row['search_over_allowed']:.2f}), peak "
        f"{row['peak_over_budget']:.2f} of the budget, gap {100 * row['gap']:.1f} %, "
        f"extra {100 * row['extra']:.1f} %",
        flush=True,
    )
    return row


def _seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def main() -> None:
    """Run and write benchmarks/results/first_step.json."""
    warnings.simplefilter("ignore")
    row_of(gpt(1, 64, batch=4, sequence=64), "min", 1)
    rows = kept_rows("first_step")
    for case in cases():
        for budget in BUDGETS:
            if not any((row["model"], row["budget"]) == (case.name, budget) for row in rows):
                rows.append(row_of(case, budget, 1 if quick() else 3))
                save("first_step", rows)


if __name__ == "__main__":
    main()
