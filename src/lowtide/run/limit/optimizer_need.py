"""The memory of an optimizer: its state, present or to come, and what its step allocates."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.meter import storages
from lowtide.run.messages import Once
from lowtide.trace.fake import Faker, FakeTracer


@dataclass(frozen=True)
class OptimizerNeed:
    """Bytes that an optimizer takes.

    Attributes:
        state_bytes: its state, present or still to come.
        step_bytes: the most that one ``step()`` allocates beyond its state.
        missing_gradient_bytes: gradients that its trainable parameters do not have yet.
        unknown: why ``step_bytes`` could not be worked out (they are 0 then), or nothing.
    """

    state_bytes: int
    step_bytes: int
    missing_gradient_bytes: int
    unknown: str = ""


def optimizer_need(optimizer: torch.optim.Optimizer) -> OptimizerNeed:
    """Run one step of a copy of ``optimizer`` on fake tensors and count what it allocates. Of sharded
    parameters (FSDP2) this process's share counts.

    Of optimizers whose step cannot run on fake tensors (it calls NumPy, say) only the present state is known;
    the caller has to tell that.

    Raises:
        PlanError: it cannot run on fake tensors, and has no state yet.
    """
    faker = Faker()
    parameters = _parameters(optimizer)
    present = _bytes(own_share(item) for state in optimizer.state.values() for item in state.values())
    missing = _missing_bytes(optimizer)
    if hasattr(optimizer, "device_state_bytes"):  # an optimizer on the host says so itself
        return OptimizerNeed(optimizer.device_state_bytes(), optimizer.step_bytes(), missing)  # type: ignore
    try:
        with ExitStack() as stack, faker.mode:
            fakes = {
                id(p): faker.tensor(own_share(p).detach()).requires_grad_(p.requires_grad) for p in parameters
            }
            groups: list[dict[str, Any]] = []
            for group in optimizer.param_groups:
                options = {name: item for name, item in group.items() if name != "params"}
                groups.append({**faker.tree(options), "params": [fakes[id(p)] for p in group["params"]]})
            for parameter in parameters:
                if parameter.requires_grad:
                    fakes[id(parameter)].grad = torch.empty_like(fakes[id(parameter)])
            twin = type(optimizer).__new__(type(optimizer))
            torch.optim.Optimizer.__init__(twin, groups, dict(optimizer.defaults))
            for name, item in optimizer.__dict__.items():
                if name not in twin.__dict__:
                    twin.__dict__[name] = item
            for parameter, state in optimizer.state.items():
                if id(parameter) in fakes:
                    twin.state[fakes[id(parameter)]] = faker.tree(
                        {key: own_share(item) for key, item in state.items()}
                    )
            stack.enter_context(_AnyNumber())
            peaks = [_step_peak(twin, type(optimizer)) for _ in range(2)]  # the first makes the state
            total = _bytes(item for state in twin.state.values() for item in state.values())
    except Exception as error:  # user code on fake tensors may raise anything
        if present:
            return OptimizerNeed(present, 0, missing, f"{type(error).__name__}: {error}")
        raise PlanError(
            f"the memory of {type(optimizer).__name__} cannot be worked out before its first step "
            f"({type(error).__name__}: {error}): run one step first, or leave optimizer= out and subtract "
            "its state from the budget"
        ) from error
    return OptimizerNeed(total, max(0, peaks[0] - (total - present), peaks[1]), missing)


class KnownNeed:
    """An optimizer's need, worked out again only when its parameters, options or state have changed.

    A step on fake tensors takes as long as planning for a small model, and every plan needs the result.
    """

    def __init__(self) -> None:
        self._known: tuple[tuple[Any, ...], OptimizerNeed] | None = None
        self._tell = Once()

    def of(self, optimizer: torch.optim.Optimizer) -> OptimizerNeed:
        """As `optimizer_need`; warns once of what is not known."""
        if hasattr(optimizer, "device_state_bytes"):
            return optimizer_need(optimizer)
        inputs = _inputs(optimizer)
        if self._known is None or self._known[0] != inputs:
            self._known = (inputs, optimizer_need(optimizer))
            if self._known[1].unknown:
                self._tell(
                    "unknown",
                    f"what a step of {type(optimizer).__name__} allocates beside its state cannot be worked "
                    f"out ({self._known[1].unknown}), so only the state counts against the budget: measure "
                    "one with lowtide.measure(optimizer.step), and leave as much of the budget free",
                )
        return replace(self._known[1], missing_gradient_bytes=_missing_bytes(optimizer))


def _inputs(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What an optimizer's memory depends on, to be compared: options, parameters, and the shapes and types of
    its state.
    """

    def form(item: Any) -> Any:
        own = own_share(item)
        if not isinstance(own, torch.Tensor):
            return repr(own)
        return id(item), own.shape, own.dtype, own.device, own.requires_grad

    state = [
        (name, form(item))
        for p in _parameters(optimizer)
        for name, item in optimizer.state.get(p, {}).items()
    ]
    return optimizer, repr(optimizer), [form(p) for p in _parameters(optimizer)], state


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _missing_bytes(optimizer: torch.optim.Optimizer) -> int:
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
    tracer.closed = True
    return _peak(tracer)


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
    return sum(s.nbytes() for s in storages(item for item in items if isinstance(item, torch.Tensor)))


def _peak(tracer: FakeTracer) -> int:
    made = [0] * len(tracer.operations)
    for storage in tracer.storages:
        if storage.producer is not None:
            made[storage.producer] += storage.bytes
    live = top = 0
    for event in tracer.events:
        if event.kind == "op":
            live += made[event.index]
            top = max(top, live)
        elif event.kind == "free" and tracer.storages[event.index].producer is not None:
            live -= tracer.storages[event.index].bytes
    return top
