"""`lowtide.compile`: `torch.compile` within a budget."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide import budget as budgets
from lowtide.compiled.backend import FREES_AT_ONCE, compile_step
from lowtide.compiled.coding import check_codecs
from lowtide.compiled.moving import check_tiers, stores
from lowtide.compiled.partitioner import Partitioner, Report
from lowtide.compiled.whole import WholeStep
from lowtide.errors import LowtideError, PlanError, expect
from lowtide.meter import resident_bytes
from lowtide.meter.resident import innermost
from lowtide.plan.data import Offload, Plan
from lowtide.private import (
    captured,
    compile_in_place,
    compile_settings,
    counted_apart,
    inductor,
    is_compiled,
    recompile_limit_hits,
    replicate_by,
    room_for_backends,
    uncompiled,
    uncut_by_ddp,
)
from lowtide.run.limit.arguments import (
    check_optimizer,
    no_replicas,
    refuse_replicas,
    sharded_units,
)
from lowtide.run.limit.handle import handle_of
from lowtide.run.limit.optimizer_need import optimizer_need
from lowtide.run.messages import limit_line
from lowtide.traced import honour_regions, wishes_of

BACKENDS = ("inductor", "aot_eager")
_HANDLE = "_lowtide_handle"


class CompiledHandle:
    """What governs a compiled model, see `lowtide.compile` and `lowtide.handle_of`.

    Attributes:
        model: the model that was compiled.
        compiled: the compiled module.
        budget: as it was given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        compiled: Any,
        budget: str | int,
        backend: str,
        optimizer: torch.optim.Optimizer | None,
        options: dict[str, Any],
        how: dict[str, Any],
        regional: bool = False,
        codecs: tuple[str, ...] = (),
        tiers: tuple[Offload, ...] = (),
    ) -> None:
        refuse_replicas(model)
        _refuse_cuda_graphs(options)
        budgets.check(budget)
        honour_regions()
        self._codecs, self._tiers = codecs, tiers
        self.model, self.compiled, self.budget = model, compiled, budget
        self._backend, self._optimizer, self._options, self._how = backend, optimizer, options, how
        self._settings = None if backend == "aot_eager" else {**FREES_AT_ONCE, **options}
        self._blocks = _blocks_of(model) if regional else []
        self._whole_alone = regional  # whether no graph is taken for a step by itself
        self._install()

    def __repr__(self) -> str:
        return limit_line(self.model, self.budget, len(self.plans), self.plan)

    @property
    def plans(self) -> list[Plan]:
        """A plan for each kind of step, in the order in which they were seen; none before the first step has
        ended. A graph that holds the whole step, its loss included, has its plan when it is compiled.
        """
        return self._report.planned + [step.plan for step in self._whole.plans.values()]

    @property
    def plan(self) -> Plan | None:
        """The plan whose peak is the highest, or ``None`` before the first step has ended."""
        return max(self.plans, key=lambda plan: plan.predicted_peak_bytes, default=None)

    @property
    def variants(self) -> list[int]:
        """In how many ways each graph is cut, where a step has several graphs or calls one several times."""
        return self._whole.variants()

    @property
    def predicted_peak_bytes(self) -> int | None:
        """The most live bytes that is predicted for any step, with what stands beside it."""
        return self.plan.predicted_peak_bytes if self.plan is not None else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """The same with nothing computed twice: `torch.compile` by itself, each buffer freed at once."""
        return max((plan.plain_peak_bytes for plan in self.plans), default=None)

    @property
    def predicted_seconds(self) -> float | None:
        """Forecast of a step's time, from calls timed alone."""
        found = self.plans
        return sum(plan.plain_seconds + plan.predicted_extra_seconds for plan in found) if found else None

    @property
    def lower_bound_seconds(self) -> float | None:
        """No schedule of the same calls within the budget adds less to a step."""
        return sum(plan.bound_extra_seconds for plan in self.plans) if self.plans else None

    def set_budget(self, budget: str | int) -> None:
        """Another budget: the next step compiles anew.

        Raises:
            BudgetError: the budget is malformed; at the next step, when no plan fits.
        """
        budgets.check(budget)
        self.budget = budget
        self._close()
        self._install()

    def _close(self) -> None:
        """Give back what lies in tiers as soon as no step under way needs it."""
        if self._tiers:
            stores().close()

    def remove(self) -> None:
        """From the next step on the model runs as `torch.compile` alone compiles it."""
        self._close()
        how: dict[str, Any] = {**self._how, "backend": self._backend}
        if self._backend == "inductor" and self._options:
            how["options"] = self._options
        if self._blocks:
            compile_in_place(self._blocks, **how)
            del self.model.__dict__["forward"]
        else:
            self.compiled.__dict__["forward"] = torch.compile(self.model, **how).forward
        self.compiled.__dict__.pop(_HANDLE, None)
        replicate_by(self.compiled, None)

    def _standing(self) -> int:
        standing = resident_bytes(self.model, self._optimizer)
        if self._optimizer is None:
            return standing
        return max(standing, resident_bytes(self.model) + optimizer_need(self._optimizer).state_bytes)

    def _backend_for(self, standing: Callable[[], int]) -> Callable[..., Any]:
        """A backend of its own for each budget: compiled code is shared by what has the same backend.

        Dynamo holds backends as long as the process lives, and they hold neither model nor handle.
        """
        whole, report, me = self._whole, self._report, weakref.ref(self)

        def backend(module: Any, inputs: Any) -> Any:
            self = me()
            assert self is not None, "who calls the compiled model holds its handle"
            whole.compiled = True
            recorded = self._whole_alone or whole.regions or sharded_units(self.model)  # weights come and go
            if recorded or not captured.is_whole_step(module):
                if what := _given(codecs=self._codecs, tiers=self._tiers):
                    raise PlanError(
                        f"{what} are for a model that is one graph and returns its loss alone: leave {what} "
                        "out, or compile the model together with its loss (fullgraph=True names graph breaks)"
                    )
                whole.mixed |= bool(report.planned)
                return whole.backend(module, inputs)
            ways = self._codecs, self._tiers, wishes_of(module)
            partitioner = Partitioner(self.budget, standing, self._settings, report, *ways)
            with whole.unseen():
                return compile_step(module, inputs, partitioner, report)

        return backend

    def _install(self) -> None:
        """From the next step on the model compiles anew, and is planned for."""
        self._report = Report()
        device = next((one.device for one in self.model.parameters()), torch.device("cpu"))
        me = weakref.ref(self)

        def standing() -> int:
            handle = me()
            return 0 if handle is None else handle._standing()

        self._whole = WholeStep(self.budget, standing, self._settings, device)
        how: dict[str, Any] = {"backend": self._backend_for(standing), **counted_apart(), **self._how}
        if self._blocks:
            self.model.__dict__.pop("forward", None)
            compile_in_place(self._blocks, **how)
            run = self.model.forward
        else:
            run = torch.compile(self.model, **how).forward  # type: ignore[union-attr]
        whole = self._whole

        def forward(*args: Any, **kwargs: Any) -> Any:
            if whole.more_than_planned and not self._whole_alone:
                self._whole_alone = True
                self._install()
                return self.compiled.__dict__["forward"](*args, **kwargs)
            whole.begin((args, kwargs))
            hits = recompile_limit_hits()
            try:
                with uncut_by_ddp(), room_for_backends():
                    result = run(*args, **kwargs)
            except BaseException as error:
                whole.stop()
                inner = getattr(error, "inner_exception", None)
                if isinstance(error, inductor.BackendCompilerFailed) and isinstance(inner, LowtideError):
                    raise inner from None
                raise
            whole.end(result, recompile_limit_hits() > hits)
            return result

        self.compiled.__dict__["forward"] = forward
        self.compiled.__dict__[_HANDLE] = self
        replicate_by(self.compiled, no_replicas)


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
    **torch_compile_options: Any,
) -> Any:
    """`torch.compile` a model so that its training step fits a budget, at the least extra time.

    A model that is one graph and returns its loss is planned when it is compiled, as `lowtide.limit_memory`
    plans a step, and cut where the plan says; what the backend would really allocate is predicted without
    compiling a kernel. Every other step (graph breaks, a loss outside the model, blocks that are compiled one
    by one, a model that is called several times) is recorded first: it runs uncompiled, in little memory.
    When its backward has ended all of it is planned within the budget, and the next step compiles. Later
    steps run compiled code alone. Where a step fits the budget as it is, it is compiled as `torch.compile`
    would.

    Args:
        model: any module. A limit that it has is replaced, and what was compiled already is compiled anew.
        budget: as of `lowtide.limit_memory`: bytes, ``"6GiB"``, ``"60%"`` of what `torch.compile` alone
            takes, ``"min"`` or ``"auto"``.
        optimizer: its state counts against the budget, too.
        backend: ``inductor`` or ``aot_eager``.
        mode, options, torch_compile_options: as of `torch.compile`.
        regional: compile the model's blocks and not the model: those that are compiled already
            (``block.compile()``), else those that repeat (the layers of a ``ModuleList``). Layers of one kind
            share a graph, which is compiled in up to three ways.
        codecs: some of ``"bfloat16"``, ``"int8"``, ``"int4"``: saved values may wait so where that costs
            least, and gradients are no longer exact. For one graph that returns its loss alone.
        tiers: ``"host"``, ``"disk"`` or `lowtide.Offload` with a path: saved values may wait there where that
            costs least. For one graph that returns its loss alone, of sizes that do not vary: each size
            compiles by itself (``dynamic=False``).

    Returns:
        What `torch.compile` returns, or with ``regional`` the model; `lowtide.handle_of` has its handle.

    Raises:
        BudgetError: the budget is malformed; in the first step, when no plan fits.
        PlanError: an argument that cannot be.

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
    lossy, away = check_codecs(codecs), check_tiers(tiers)
    if regional and (what := _given(codecs=lossy, tiers=away)):
        raise PlanError(f"{what} are for a model that is one graph: leave out {what}, or regional")
    how = torch_compile_options
    if away and how.setdefault("dynamic", False):
        raise PlanError("tiers are for sizes that do not vary: leave out dynamic=True, or tiers")
    budgets.check(budget)
    check_optimizer(model, optimizer)
    optimizer = None if optimizer is None else innermost(optimizer)
    inner = uncompiled(model)
    for limited in (model, inner):
        if (before := handle_of(limited)) is not None:
            before.remove()
    model = inner
    compiled = model if regional else torch.compile(model, backend="aot_eager", **how)
    CompiledHandle(model, compiled, budget, backend, optimizer, chosen, how, regional, lossy, away)
    return compiled


def limit_compiled(
    compiled: Any, budget: str | int, *, optimizer: torch.optim.Optimizer | None = None
) -> CompiledHandle:
    """Hold a budget for what `torch.compile` returned: its next step compiles anew, with the backend and the
    settings that it was made with.

    Raises:
        PlanError: it was compiled in place (``model.compile()``), or with another backend.
    """
    made = compile_settings(compiled)
    if made is None:
        raise PlanError(
            "this model was compiled in place (model.compile()), and a limit cannot be put on that: call "
            "lowtide.compile(model, budget) in place of it"
        )
    model, backend, options, how = made
    if backend not in BACKENDS:
        raise PlanError(
            f"this model was compiled with the backend {backend!r}: a budget can be held for "
            f"{', '.join(BACKENDS)}"
        )
    return CompiledHandle(model, compiled, budget, backend, optimizer, options, how)


def compile_options(budget: str | int) -> dict[str, Any]:
    """Settings for ``torch.compile(model, options=...)`` that hold a budget.

    A graph is all that is known here: its inputs (parameters among them) and what it allocates count,
    gradients that stand before the step, an optimizer's state and other graphs do not.
    `lowtide.compile` knows more.

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
    return {**FREES_AT_ONCE, "custom_partitioner_fn": Partitioner(budget, options={})}


def _blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks that regional compilation compiles: those that are compiled already, else those that repeat.

    Blocks repeat where a ``ModuleList`` or ``Sequential`` holds several modules of one class with parameters;
    of lists within such blocks none counts.

    Raises:
        PlanError: there are none.
    """
    compiled = [block for _, block in model.named_modules() if block is not model and is_compiled(block)]
    found = compiled or _repeated(model)
    if not found:
        raise PlanError(
            f"{type(model).__name__} has no blocks that repeat: compile those that you mean "
            "(block.compile()) before lowtide.compile(..., regional=True), or leave regional out"
        )
    return found


def _repeated(module: torch.nn.Module) -> list[torch.nn.Module]:
    found: list[torch.nn.Module] = []
    for child in module.children():
        inner = (
            list(child.children()) if isinstance(child, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        )
        parts = [one for one in inner if next(one.parameters(), None) is not None]
        if len(parts) > 1 and len({type(one) for one in parts}) == 1 and next(parts[0].children(), None):
            found += parts
        else:
            found += _repeated(child)
    return found


def _given(**ways: Sequence[Any]) -> str:
    """The names of the arguments that hold something."""
    return " and ".join(name for name, given in ways.items() if given)


def _refuse_cuda_graphs(options: dict[str, Any]) -> None:
    if options.get("triton.cudagraphs"):
        raise PlanError(
            "CUDA graphs keep a pool of memory of their own, which no budget is held for: use "
            "mode='max-autotune-no-cudagraphs' or none"
        )
