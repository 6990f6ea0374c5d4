"""What an optimizer takes: the bytes of its state, present or to come, and of its own step.

In: an optimizer. Out: its `OptimizerNeed`, from a step of a copy of it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.meter.resident import bytes_under, own_share
from lowtide.plan.simulate import plain
from lowtide.trace.fake import Faker, FakeTracer

_WAYS = {"fused=True": {"fused": True, "foreach": False}, "foreach=False": {"foreach": False}}
"""Options of PyTorch's optimizers that run an update in another way."""


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
            f"the memory of {type(optimizer).__name__} cannot be computed before its first step "
            f"({type(error).__name__}: {error}): run one step first, or leave optimizer= out and "
            "subtract its state from the budget"
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


def depends_on(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What an optimizer's need depends on, for comparison: options, parameters, how many have state. A number
    only decides by being zero (no momentum, no decay): a learning rate changes with every step.
    """
    parameters = [(id(p), p.requires_grad) for p in _parameters(optimizer)]
    options = [{**group, "params": str(len(group["params"]))} for group in optimizer.param_groups]
    host = getattr(optimizer, "host_fraction", None)  # of an optimizer whose state is partly elsewhere
    return id(optimizer), _deciding(options), parameters, len(optimizer.state), host


def _deciding(option: Any) -> Any:
    """What an optimizer can decide by an option, for comparison."""
    if isinstance(option, torch.Tensor):
        return option.shape, option.dtype, option.device
    if isinstance(option, dict):
        return {name: _deciding(item) for name, item in option.items()}
    if isinstance(option, list | tuple):
        return [_deciding(item) for item in option]
    return option != 0 if isinstance(option, int | float) else repr(option)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def missing_gradient_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the gradients that the optimizer's trainable parameters do not have yet."""
    return sum(
        own_share(p).nbytes
        for p in _parameters(optimizer)
        if p.requires_grad and p.grad is None and not hasattr(p, "gradient_slab")
    )


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
