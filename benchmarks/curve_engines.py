"""The engines that `budget_curve` compares: one small class for all, a function for each.

Every variant is its own copy of the model over the *same* parameters and buffers, so that no engine is
faster for where its weights lie. Each compiled one has a backend object of its own: Dynamo keeps compiled
code by the function that it came from, and hands what one variant compiled to the next of the same class
otherwise.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import lowtide
from benchmarks.common import UNSETTLED, Case, total_peak

KNOB = tuple(f"0.{tenth}" for tenth in range(9, -1, -1))
"""Settings of ``torch._functorch.config.activation_memory_budget``."""

_SAVED = (
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)
"""What selective checkpointing keeps: the compute-intensive operations that PyTorch's own examples list."""


@dataclass(frozen=True)
class Engine:
    """One point's maker.

    Attributes:
        name: ``plain``, ``checkpoint``, ``selective``, ``knob`` or ``lowtide``.
        compiled: under `torch.compile`, or eagerly.
        setting: of the knob, the ratio; of lowtide, the budget in bytes or ``min``; else empty.
    """

    name: str
    compiled: bool
    setting: str = ""

    @property
    def key(self) -> str:
        """What names it among a model's rows."""
        return " ".join(filter(None, ("compiled" if self.compiled else "eager", self.name, self.setting)))


RIVALS = (
    *(Engine(name, compiled) for compiled in (True, False) for name in ("plain", "checkpoint", "selective")),
    *(Engine("knob", True, setting) for setting in KNOB),
)
PLAIN = RIVALS[0]
QUICK = (PLAIN, Engine("checkpoint", True), Engine("lowtide", False, "min"), Engine("lowtide", True, "min"))
"""One of each kind, for a look whether everything runs."""

_ROOMS = {True: ("compiled", "plan", "trace", "private"), False: ("run", "plan", "trace", "private")}
"""Where the code stands that decides a compiled or an eager point of lowtide's."""


@cache
def made_by(engine: Engine) -> str:
    """What a point follows from: PyTorch's version, and for lowtide's own a digest of its code."""
    if engine.name != "lowtide":
        return f"torch {torch.__version__}"
    package = Path(lowtide.__file__).parent
    files = sorted(file for room in _ROOMS[engine.compiled] for file in (package / room).rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return f"torch {torch.__version__}, lowtide {digest}"


@dataclass
class Variant:
    """A model under an engine, ready to step.

    Attributes:
        engine: whose it is.
        model: a copy that shares its parameters with every other variant of the case.
        step: one forward and backward from cleared gradients.
        prepare_seconds: what its first steps took, compilation and planning included.
        peak_bytes: measured peak of a step: parameters, inputs and gradients included.
        promised: lowtide's ``budget_bytes``, ``predicted_peak_bytes``, ``predicted_extra_seconds``,
            ``predicted_plain_seconds``, ``gap``.
    """

    engine: Engine
    model: torch.nn.Module
    step: Callable[[], None]
    prepare_seconds: float
    peak_bytes: int
    promised: dict[str, Any] = field(default_factory=dict)


def blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The outermost modules that stand several times in a list of their kind: what is checkpointed."""
    repeated = isinstance(module, torch.nn.ModuleList | torch.nn.Sequential)
    kinds = [type(child) for child in module.children()]
    for child in module.children():
        if repeated and kinds.count(type(child)) > 1 and any(True for _ in child.parameters()):
            yield child
        else:
            yield from blocks(child)


def checkpoint_blocks(model: torch.nn.Module, selective: bool) -> None:
    """Wrap the forward of every block in `torch.utils.checkpoint`, non-reentrant."""
    options: dict[str, Any] = {"use_reentrant": False}
    if selective:
        saved = [getattr(torch.ops.aten, name).default for name in _SAVED if hasattr(torch.ops.aten, name)]
        options["context_fn"] = partial(create_selective_checkpoint_contexts, saved)
    found = list(blocks(model))
    assert found, "a model without repeated blocks"
    for block in found:

        def again(*args: Any, _forward: Any = block.forward, **kwargs: Any) -> Any:
            return checkpoint(_forward, *args, **options, **kwargs)

        block.forward = again


class OwnBackend:
    """Inductor, as a backend object that no other variant shares.

    Args:
        setting: of the knob, or empty.
    """

    def __init__(self, setting: str = "") -> None:
        self.setting, self.graphs = setting, 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        """Compile one graph."""
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        self.graphs += 1
        with config.patch(activation_memory_budget=float(self.setting)) if self.setting else nullcontext():
            return compile_fx(module, inputs)


def shared_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the module tree over the same parameters and buffers."""
    kept = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in kept})


def variant(engine: Engine, case: Case, original: torch.nn.Module, batch: dict[str, Any]) -> Variant:
    """Build, compile and plan, then measure the peak of a settled step.

    Raises:
        lowtide.BudgetError: lowtide's budget cannot be met.
    """
    model = shared_copy(original)
    if engine.name in ("checkpoint", "selective"):
        checkpoint_blocks(model, engine.name == "selective")
    callee: Any = model
    settling, backend = 2, None
    if engine.name == "lowtide":
        budget = engine.setting if engine.setting == "min" else int(engine.setting)
        if engine.compiled:
            callee = lowtide.compile(model, budget)
            settling = 3
        else:
            lowtide.limit_memory(model, budget)
            settling = UNSETTLED
    elif engine.compiled:
        backend = OwnBackend(engine.setting)
        callee = torch.compile(model, backend=backend)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        callee(**batch).loss.backward()

    begin = time.perf_counter()
    for _ in range(settling):
        step()
    seconds = time.perf_counter() - begin
    assert backend is None or backend.graphs, "another variant's compiled code was used"
    peak = total_peak(model, batch, step)
    model.zero_grad(set_to_none=True)
    return Variant(engine, model, step, seconds, peak, promises(engine, callee))


def promises(engine: Engine, callee: Any) -> dict[str, Any]:
    """What lowtide says of a model's step, for a settled one."""
    if engine.name != "lowtide":
        return {}
    handle: Any = lowtide.handle_of(callee)
    plan = handle.plan
    found = {
        "budget_bytes": plan.budget_bytes,
        "predicted_peak_bytes": plan.predicted_peak_bytes,
        "predicted_extra_seconds": plan.predicted_extra_seconds,
        "predicted_plain_seconds": plan.plain_seconds,
        "gap": plan.gap,
    }
    if engine.compiled:
        found["predicted_peak_bytes"] = handle.predicted_peak_bytes
    return found
