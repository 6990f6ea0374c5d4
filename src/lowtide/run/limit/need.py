"""Memory that is needed beside a plan's step: by the optimizer, and by PyTorch's caching allocator.

In: an optimizer, with the model that it trains. Out: the bytes of its state, present or to come, and of its
own step (`optimizer_need`), and how these count against a budget (`CountedOptimizer`). Or in: a plan. Out:
what the allocator reserves for its steps (`reserved_bytes`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowtide import private
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter import resident_bytes
from lowtide.meter.cuda import caching_allocator, workspace_bytes
from lowtide.meter.resident import bytes_under, model_device
from lowtide.plan.data import Plan
from lowtide.plan.reserved_bytes import reserved_after
from lowtide.plan.simulate import plain
from lowtide.remedies import BUFFERS, GRADIENTS, PARAMETERS, REDUCED, STATE, UPDATE, WORKSPACES, Holder
from lowtide.run.messages import Once
from lowtide.trace.fake import Faker, FakeTracer
from lowtide.words import format_bytes

_WAYS = {"fused=True": {"fused": True, "foreach": False}, "foreach=False": {"foreach": False}}
"""Options of PyTorch's optimizers that run an update in another way."""

_STEPS = 3
"""Steps until what is reserved has settled."""


@dataclass(frozen=True)
class OptimizerNeed:
    """Bytes that an optimizer takes.

    Attributes:
        state_bytes: its state, present or still to come.
        step_bytes: the most that one ``step()`` allocates beyond its state.
        to_come_bytes: of the state what is not there yet.
        unknown: why ``step_bytes`` could not be worked out (they are 0 then), or nothing.
    """

    state_bytes: int
    step_bytes: int
    unknown: str = ""
    to_come_bytes: int = 0


class Shortage(NamedTuple):
    """The optimizer's own step takes more than the budget.

    Attributes:
        limit_bytes: the budget.
        parts: what is live at its peak, in bytes by name.
        less: an option of the optimizer with which its update takes less, and how many bytes less.
    """

    limit_bytes: int
    parts: dict[str, int]
    less: tuple[str, int] = ("", 0)

    @property
    def least_bytes(self) -> int:
        """The smallest budget that holds it."""
        return sum(self.parts.values())

    def error(self) -> BudgetError:
        """The refusal, with these facts."""
        words, freed = self.less
        return BudgetError(
            None,
            self.least_bytes,
            f"{words} takes {format_bytes(freed)} less for its update." if words else "",
            budget_bytes=self.limit_bytes,
            parts=self.parts,
            subject="optimizer.step()",
            made=[Holder(UPDATE, self.parts[UPDATE], known_remedy=self.less)] if self.parts[UPDATE] else (),
        )


class CountedOptimizer:
    """The optimizer that a budget counts, and the bytes that it takes; all are 0 without one.

    Args:
        model: which it trains.
        optimizer: the optimizer, or ``None``.
        warn_once: warns of something once.

    Attributes:
        optimizer: the optimizer, or ``None``.
        reduced_bytes: what gradients are copied into, between backward and the optimizer's step, while ranks
            add them up.
        moved_bytes: of its state, what ``host_fraction="auto"`` moved to the host.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, warn_once: Once
    ) -> None:
        self.model, self._warn_once = model, warn_once
        self.reduced_bytes = 0
        self.set(optimizer)

    def set(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Count this optimizer from now on."""
        self.optimizer, self.moved_bytes = optimizer, 0
        self._known: tuple[Any, OptimizerNeed] | None = None

    @property
    def need(self) -> OptimizerNeed:
        """What it takes, worked out again only where that may have changed: it takes as long as planning for
        a small model.
        """
        if self.optimizer is None:
            return OptimizerNeed(0, 0)
        seen = _depends_on(self.optimizer)
        if self._known is None or self._known[0] != seen:
            self._known = seen, optimizer_need(self.optimizer)
            if unknown := self._known[1].unknown:
                self._warn_once(
                    "unknown",
                    f"what a step of {type(self.optimizer).__name__} allocates beside its state cannot be "
                    f"worked out ({unknown}), so only the state counts against the budget: measure "
                    "one with lowtide.measure(optimizer.step), and leave as much of the budget free",
                )
        return self._known[1]

    @property
    def state_bytes(self) -> int:
        """Bytes of its state on the device, present or still to come."""
        return self.need.state_bytes

    @property
    def step_peak_bytes(self) -> int:
        """Bytes at the peak of its own step."""
        return sum(self._parts().values())

    def shortage(self, limit: int | None) -> Shortage | None:
        """What its own step takes where that is above the limit, or ``None``."""
        parts = self._parts()
        if limit is None or self.optimizer is None or sum(parts.values()) <= limit:
            return None
        return Shortage(limit, parts, smaller_update(self.optimizer, self.need))

    def _parts(self) -> dict[str, int]:
        """What is live at the peak of its own step, in bytes by name."""
        if self.optimizer is None:
            return {}
        need, own = self.need, resident_bytes(self.model)
        own += missing_gradient_bytes(self.optimizer)
        parameters = sum(own_share(parameter).nbytes for parameter in self.model.parameters())
        buffers = min(own - parameters, bytes_under(self.model.buffers()))
        return {
            PARAMETERS: parameters,
            BUFFERS: buffers,
            GRADIENTS: own - parameters - buffers,
            STATE: need.state_bytes,
            WORKSPACES: workspace_bytes(model_device(self.model)),
            UPDATE: need.step_bytes,
            REDUCED: max(0, self.reduced_bytes - need.step_bytes),
        }

    def move_state(self, extra_seconds: Callable[[int], float], shares_plan: bool) -> None:
        """With ``host_fraction="auto"``, move state to the host while that takes less time than recomputing.

        Args:
            extra_seconds: what a plan adds to a step where this many bytes less are resident; infinite where
                no plan fits.
            shares_plan: ranks share one plan.

        Raises:
            PlanError: they do, and each would choose for itself.
        """
        optimizer: Any = self.optimizer
        if getattr(optimizer, "host_fraction", None) != "auto":
            return
        if shares_plan:
            raise PlanError(
                'host_fraction="auto" is chosen by each rank for itself, but these ranks share one '
                "plan: give the share as a number"
            )
        everything = optimizer.device_state_bytes(0.0)

        def seconds(share: float) -> float:
            return extra_seconds(everything - optimizer.device_state_bytes(share))

        share = optimizer.choose_host_fraction(seconds)
        self.moved_bytes = everything - optimizer.device_state_bytes(share)


def smaller_update(optimizer: torch.optim.Optimizer, need: OptimizerNeed) -> tuple[str, int]:
    """The option with which the optimizer's update takes least beside its state, and how many bytes less that
    is; no words where it takes least as it is.
    """
    best = ("", 0)
    for name, options in _WAYS.items():
        if not need.step_bytes or not options.keys() <= optimizer.defaults.keys():
            continue
        if "fused" in options and isinstance(optimizer, torch.optim.Adagrad) and _on_accelerator(optimizer):
            continue  # PyTorch has that one for CPUs alone
        try:
            less = need.step_bytes - optimizer_need(optimizer, options).step_bytes
        except PlanError:
            continue  # not with these parameters
        if less > best[1]:
            best = f"{type(optimizer).__name__}(..., {name})", less
    return best


def _on_accelerator(optimizer: torch.optim.Optimizer) -> bool:
    return any(parameter.device.type != "cpu" for parameter in _parameters(optimizer))


def optimizer_need(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any] | None = None
) -> OptimizerNeed:
    """Run one step of a copy of ``optimizer`` on fake tensors and count what it allocates. Of sharded
    parameters (FSDP2) this process's share counts.

    Of optimizers whose step cannot run on fake tensors (it calls NumPy, say) only the present state is known;
    the caller has to tell that.

    Args:
        optimizer: the optimizer.
        options: of its parameter groups, in place of their own.

    Raises:
        PlanError: it cannot run on fake tensors, and has no state yet.
    """
    if hasattr(optimizer, "device_state_bytes"):  # an optimizer on the host says so itself
        return OptimizerNeed(optimizer.device_state_bytes(), optimizer.step_bytes())  # type: ignore
    faker, more = Faker(), options or {}
    present = _bytes(own_share(item) for state in optimizer.state.values() for item in state.values())
    try:
        with faker.mode:
            fakes: dict[torch.Tensor, torch.Tensor]
            fakes = {p: faker.tensor(own_share(p).detach()) for p in _parameters(optimizer)}
            for parameter, fake in fakes.items():
                if parameter.requires_grad:
                    fake.requires_grad_().grad = torch.empty_like(fake)
            groups = [
                {**faker.tree(_as_chosen(group)), **more, "params": [fakes[p] for p in group["params"]]}
                for group in optimizer.param_groups
            ]
            twin = type(optimizer).__new__(type(optimizer))
            torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
            twin.__dict__.update({n: item for n, item in vars(optimizer).items() if n not in vars(twin)})
            for parameter, state in optimizer.state.items():
                if parameter in fakes:
                    own = {key: own_share(item) for key, item in state.items()}
                    twin.state[fakes[parameter]] = faker.tree(own)
            with _AnyNumber(), private.foreach_takes_fakes():
                peaks = [_step_peak(twin, type(optimizer)) for _ in range(2)]  # the first makes the state
            total = _bytes(item for state in twin.state.values() for item in state.values())
    except Exception as error:  # user code on fake tensors may raise anything
        if present and not more:
            return OptimizerNeed(present, 0, f"{type(error).__name__}: {error}")
        raise PlanError(
            f"the memory of {type(optimizer).__name__} cannot be worked out before its first step "
            f"({type(error).__name__}: {error}): run one step first, or leave optimizer= out and subtract "
            "its state from the budget"
        ) from error
    to_come = total - present
    return OptimizerNeed(total, max(0, peaks[0] - to_come, peaks[1]), to_come_bytes=to_come)


def _as_chosen(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a parameter group, without the parameters. ``foreach`` is off where the parameters' type
    rules it out, since the type of the fake tensors that stand for them does not.
    """
    options = {**group, "params": ()}
    if options.get("foreach", True) is None and not all(map(private.has_foreach, group["params"])):
        options["foreach"] = False
    return options


def _depends_on(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What an optimizer's need depends on, for comparison: options, parameters, how many have state."""
    parameters = [(id(p), p.requires_grad) for p in _parameters(optimizer)]
    host = getattr(optimizer, "host_fraction", None)  # of an optimizer whose state is partly elsewhere
    return id(optimizer), repr(optimizer), parameters, len(optimizer.state), host


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def missing_gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the gradients that the optimizer's trainable parameters do not have yet."""
    return sum(
        own_share(p).nbytes
        for p in _parameters(optimizer)
        if p.requires_grad and p.grad is None and not hasattr(p, "gradient_slab")
    )


def own_share(item: Any) -> Any:
    """This process's part of a DTensor; anything else unchanged."""
    return item.to_local() if hasattr(item, "to_local") else item


def _step_peak(twin: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> int:
    device = next((p.device for p in _parameters(twin)), torch.device("cpu"))
    tracer = FakeTracer(device=device)
    with tracer:
        step = kind.step
        step.__wrapped__(twin) if hasattr(step, "__wrapped__") else twin.step()  # type: ignore[attr-defined]
    graph = tracer.graph()
    return plain(graph).peak_bytes - graph.resident_bytes


class _AnyNumber(private.TorchDispatchMode):
    """Answers with some number where a fake tensor is read: an optimizer's memory does not depend on its step
    count.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 7.5 if args[0].is_floating_point() else 7
        return func(*args, **(kwargs or {}))


def _bytes(items: Any) -> int:
    return bytes_under(item for item in items if isinstance(item, torch.Tensor))


def reserved_bytes(graph: StepGraph, plan: Plan, model: torch.nn.Module, need: OptimizerNeed) -> int:
    """What is reserved once steps run under a plan, from now on, after one ``torch.cuda.empty_cache()``.

    Args:
        graph: of the step.
        plan: keeps, recomputes and no more: what moves has memory of its own.
        model: its gradients go before the next step, unless the step was profiled with them.
        need: what the optimizer takes.
    """
    allocator, live = caching_allocator(model_device(model))
    allocator.empty_cache()
    # what is left of the profiled step: the optimizer's update, and then its gradients go
    sizes = [parameter.nbytes for parameter in model.parameters() if parameter.requires_grad]
    for size in _blocks(need.to_come_bytes, sizes):
        allocator.allocate(size)
    update = _blocks(need.step_bytes, sizes)
    for block in [allocator.allocate(size) for size in update]:
        allocator.free(block)
    if not any(storage.kind == "gradient" for storage in graph.storages):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for address in {gradient.untyped_storage().data_ptr() for gradient in gradients}:
            if address in live:
                allocator.free(live[address])
    reserved_after(graph, plan.stored, allocator, _STEPS, update)
    return allocator.peak_reserved_bytes


def _blocks(bytes: int, sizes: list[int]) -> list[int]:
    """Blocks of these sizes that come to so many bytes, the last one cut."""
    blocks: list[int] = []
    while bytes > 0 and sum(sizes) > 0:
        for size in sizes:
            blocks.append(min(size, bytes))
            bytes -= blocks[-1]
            if bytes <= 0:
                break
    return [block for block in blocks if block]
