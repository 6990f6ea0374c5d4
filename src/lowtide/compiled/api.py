"""`lowtide.compile`: `torch.compile` within a budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.compiled.capture import FREES_AT_ONCE
from lowtide.compiled.choose_cuts import Asked
from lowtide.compiled.compiled_handle import Backend, CompiledHandle
from lowtide.compiled.moving import check_tiers
from lowtide.compiled.planning import cutter_within
from lowtide.errors import PlanError, expect
from lowtide.extensions.optimizer.counted import check_optimizer
from lowtide.extensions.scopes.marked_regions import honour_regions
from lowtide.plan import check_seconds
from lowtide.plan.data import Offload
from lowtide.private import Compiling, compile_settings, inductor, is_compiled, uncompiled
from lowtide.run.limit.handle import handle_of

BACKENDS = ("inductor", "aot_eager")


def compile(
    model: torch.nn.Module,
    budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    backend: str = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    regional: bool = False,
    codecs: str | Sequence[str] = (),
    tiers: str | Offload | Sequence[str | Offload] = (),
    plan_seconds: float | None = None,
    **torch_compile_options: Any,
) -> Any:
    """`torch.compile` a model so that its training step fits a budget, at the least extra time.

    If the model is one graph and returns its loss, it is planned when it is compiled: the plan decides which
    tensors the forward saves, and predicts the memory that the backend allocates. Every other step (graph
    breaks, a loss outside the model, blocks that are compiled one by one, several calls of the model) is
    recorded first: it runs uncompiled, in little memory. At the end of its backward the whole step is planned
    within the budget, and the next step compiles. Later steps run compiled code only. If the step of
    `torch.compile` fits the budget, it is not changed.

    Args:
        model: any module. A limit of the model is replaced, and compiled code is compiled again.
        budget: as in `lowtide.limit_memory`: bytes, ``"6GiB"``, ``"60%"`` of the peak of `torch.compile`
            alone, ``"min"`` or ``"auto"``.
        optimizer: the budget also counts its state.
        backend: ``inductor`` or ``aot_eager``.
        mode, options, torch_compile_options: as in `torch.compile`.
        regional: compile the model's blocks and not the model. The blocks are those that are compiled already
            (``block.compile()``, or `torch.compile`), or else the layers of a ``ModuleList``. Layers of one
            kind share a graph, which is compiled in up to three variants.
        codecs: refused: only `lowtide.limit_memory` has codecs.
        tiers: ``"host"``, ``"disk"`` or `lowtide.Offload` with a path: saved values may move there. The model
            has to be one graph that returns its loss alone. Each size compiles separately
            (``dynamic=False``).
        plan_seconds: about how long one search for a plan may take; there are up to eight searches. Lowering
            and compiling of candidates takes more time. ``None`` is half a minute.

    Returns:
        The compiled model; with ``regional`` the model itself. `lowtide.handle_of` returns its handle.

    Raises:
        BudgetError: the budget is malformed; in the first step, no plan fits.
        PlanError: an argument is not valid.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> compiled = lowtide.compile(model, "100%", backend="aot_eager")
        >>> compiled(torch.randn(4, 8)).sum().backward()
        >>> lowtide.handle_of(compiled).plan.changes_nothing
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"lowtide.compile takes a torch.nn.Module, not {type(model).__name__}")
    if backend not in BACKENDS:
        raise PlanError(f"lowtide.compile knows no backend {backend!r}: give one of {', '.join(BACKENDS)}")
    if backend != "inductor" and (mode or options):
        raise PlanError(f"mode and options are Inductor's, and the backend is {backend!r}: drop them")
    if mode is not None and options:
        raise PlanError("mode and options cannot be given together: give options alone")
    settings = options is None or isinstance(options, dict)
    expect(settings, "compile(options=)", options, "a dictionary of Inductor's settings")
    chosen = dict(options or {})
    if mode is not None and mode != "default":
        try:
            chosen = inductor.mode_options(mode)
        except RuntimeError as error:
            raise PlanError(f"compile(mode=) was given {mode!r}: {error}") from None
    unknown = inductor.unknown_options(chosen)
    expect(not unknown, "compile(options=)", unknown, "settings that torch._inductor.config has")
    expect(
        isinstance(codecs, Sequence), "compile(codecs=)", codecs, "nothing: compiled code encodes no values"
    )
    if codecs:
        names = ", ".join(map(repr, [codecs] if isinstance(codecs, str) else codecs))
        raise PlanError(
            f'compiled code has no codecs, and codecs= is {codecs!r}: leave codecs out (tiers="disk" '
            "moves values to a disk), or do not compile: lowtide.limit_memory(model, budget, "
            f"policy=lowtide.policies.mixed({names}))"
        )
    away = check_tiers(tiers)
    if regional and away:
        raise PlanError("tiers are for a model that is one graph: leave out tiers, or regional")
    how = torch_compile_options
    if away and how.setdefault("dynamic", False):
        raise PlanError("tiers are for sizes that do not vary: leave out dynamic=True, or tiers")
    budgets.check(budget)
    check_seconds(plan_seconds, None, "compile(plan_seconds=)")
    check_optimizer(model, optimizer)
    inner = uncompiled(model)
    for limited in (model, inner):
        if (before := handle_of(limited)) is not None:
            before.remove()
    model = inner
    compiled = model if regional else torch.compile(model, backend="aot_eager", **how)
    blocks = _blocks_of(model) if regional else ()
    asked = Asked(budget, away, plan_seconds)
    CompiledHandle(model, compiled, asked, Backend(backend, chosen, how), optimizer, blocks)
    return compiled


def limit_compiled(
    compiled: Any,
    budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    plan_seconds: float | None = None,
) -> CompiledHandle:
    """Hold a budget for what `torch.compile` returned: its next step compiles anew, with the backend and the
    settings that it was made with.

    Raises:
        PlanError: it was compiled with another backend.
    """
    model, name, options, how = compile_settings(compiled)
    backend, asked = Backend(name, options, how), Asked(budget, plan_seconds=plan_seconds)
    _check_backend(backend.name)
    return CompiledHandle(model, compiled, asked, backend, optimizer)


def limit_compiled_blocks(
    model: torch.nn.Module,
    budget: str | int,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    plan_seconds: float | None = None,
) -> CompiledHandle | None:
    """Hold a budget for a model of which blocks that repeat are compiled, each by itself: as `compile` with
    ``regional``, with what they were compiled with. ``None`` where no blocks repeat, or they differ in that.

    Raises:
        PlanError: they are compiled with another backend, or with CUDA graphs.
    """
    blocks = [block for block in model.modules() if block is not model and is_compiled(block)]
    found = [compile_settings(block) for block in blocks]
    kinds = [type(inner) for inner, *_ in found]
    if len(set(kinds)) == len(kinds) or any(settings[1:] != found[0][1:] for settings in found):
        return None
    _, backend, options, how = found[0]
    _check_backend(backend)
    how = {**how, "backend": backend, "options": options, "plan_seconds": plan_seconds}
    compile(model, budget, optimizer=optimizer, regional=True, **how)
    return model.__dict__["_lowtide_handle"]


def limit_compiled_forward(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    budget: str | int,
    optimizer: torch.optim.Optimizer | None,
    compiling: Compiling,
    plan_seconds: float | None = None,
) -> CompiledHandle:
    """Hold a budget for a model that `torch.compile` is around: its forward runs through the handle.

    Args:
        model: the model.
        forward: its own.
        budget: as of `lowtide.compile`.
        optimizer: its state counts, too.
        compiling: what compiles, and with what.
        plan_seconds: as of `lowtide.compile`.

    Raises:
        PlanError: it is compiled with another backend, or with CUDA graphs.
    """
    _check_backend(compiling.backend)
    backend = Backend(compiling.backend, compiling.options, {"fullgraph": compiling.fullgraph})
    asked = Asked(budget, plan_seconds=plan_seconds)
    return CompiledHandle(model, None, asked, backend, optimizer, forward=forward)


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise PlanError(
            f"this model was compiled with the backend {backend!r}: a budget can be held for "
            f"{', '.join(BACKENDS)}"
        )


def compile_options(budget: str | int) -> dict[str, Any]:
    """Settings for ``torch.compile(model, options=...)`` that hold a budget.

    The budget counts the inputs of one graph (parameters among them) and its allocations. It does not count
    earlier gradients, the optimizer's state and other graphs. `lowtide.compile` counts these, too.

    Args:
        budget: as of `lowtide.compile`.

    Raises:
        BudgetError: the budget is malformed.

    Example:
        >>> import torch, lowtide
        >>> model = torch.compile(torch.nn.Linear(8, 8), options=lowtide.compile_options("6GiB"))
    """
    budgets.check(budget)
    honour_regions()
    return {**FREES_AT_ONCE, "custom_partitioner_fn": cutter_within(budget)}


def _blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that regional compilation compiles: those that are compiled already, else those that repeat.

    Blocks repeat where a ``ModuleList`` or ``Sequential`` holds several modules of one class with parameters;
    of lists within such blocks none counts.

    Raises:
        PlanError: there are none.
    """
    compiled = [block for _, block in model.named_modules() if block is not model and is_compiled(block)]
    found = compiled or _find_repeated(model)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no blocks that repeat: compile its blocks (block.compile()) "
            "before lowtide.compile(..., regional=True), or leave regional out"
        )
    return found


def _find_repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        inner = (
            list(child.children()) if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        )
        parts = [one for one in inner if next(one.parameters(), None) is not None]
        if len(parts) > 1 and len({type(one) for one in parts}) == 1 and next(parts[0].children(), None):
            found += parts
        else:
            found += _find_repeated(child)
    return found
