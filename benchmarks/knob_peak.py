"""The peak of a compiled step as `torch.compile`'s own knob goes down, and under budgets in bytes.

python -m benchmarks knob_peak

PyTorch issue 197838: `activation_memory_budget` asks for a share of what is saved, and from some point on a
smaller share takes a larger peak. The backend is ``aot_eager``, where no kernel is compiled and the cut of
the graph alone decides. Bytes are exact; nothing is timed.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch

import lowtide
from benchmarks.cases import llama
from benchmarks.common import Case, save, step_of, total_peak

LAYERS = (16, 24, 32)
RATIOS = (0.4, 0.3, 0.2, 0.15, 0.1, 0.05, 0.0)
WIDTH = 256


def peak_of(case: Case, callee: Any, model: torch.nn.Module) -> int:
    """Measured peak of the third step, above the parameters: of a compiled model, or of a limited one."""
    batch = case.batch()
    step = step_of(callee, batch)
    for _ in range(3):
        step()
    peak = total_peak(model, batch, step)
    model.zero_grad(set_to_none=True)
    return peak - sum(parameter.nbytes for parameter in model.parameters())


def knob(case: Case, original: torch.nn.Module, ratio: float) -> int:
    """The peak under PyTorch's knob, compiled by a backend of its own."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._functorch import config

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with config.patch(activation_memory_budget=ratio):
            return aot_eager(module, inputs)

    torch.compiler.reset()
    model = copy.deepcopy(original)
    return peak_of(case, torch.compile(model, backend=backend), model)


def budget(case: Case, original: torch.nn.Module, asked: int | str) -> tuple[int, int]:
    """The peak under a budget of bytes, and the budget; both above the parameters."""
    torch.compiler.reset()
    model = copy.deepcopy(original)
    resident = sum(parameter.nbytes for parameter in model.parameters())
    limit = asked + resident if isinstance(asked, int) else asked
    callee = lowtide.compile(model, limit, backend="aot_eager")
    peak = peak_of(case, callee, model)
    handle: Any = lowtide.handle_of(callee)
    return peak, handle.plan.budget_bytes - resident


def main() -> None:
    """Write benchmarks/results/knob_peak.json."""
    rows = []
    for layers in LAYERS:
        case = llama(layers, WIDTH)
        original = case.build()
        for ratio in RATIOS:
            peak = knob(case, original, ratio)
            rows.append({"layers": layers, "way": "knob", "asked": ratio, "peak_bytes": peak})
            print(f"{layers} layers, knob {ratio}: {peak / 2**20:.1f} MiB", flush=True)
            gc.collect()
        lowest = min(row["peak_bytes"] for row in rows if row["layers"] == layers)
        for share in (1.0, 0.9, 0.8, "min"):
            asked = share if isinstance(share, str) else int(share * lowest)
            try:
                peak, held = budget(case, original, asked)
            except lowtide.BudgetError as error:
                rows.append({"layers": layers, "way": "lowtide", "asked": share, "refused": str(error)})
                continue
            row = {"layers": layers, "way": "lowtide", "asked": share, "budget_bytes": held}
            rows.append({**row, "peak_bytes": peak})
            shown = f"{peak / 2**20:.1f} of {held / 2**20:.1f} MiB"
            print(f"{layers} layers, lowtide {share}: {shown}", flush=True)
            gc.collect()
    save("knob_peak", rows, model=f"llama of width {WIDTH}, 2 x 512 tokens, aot_eager")


if __name__ == "__main__":
    main()
