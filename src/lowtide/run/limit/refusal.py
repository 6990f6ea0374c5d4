"""What lowtide refuses, in a user's words.

In: arguments and models that do not fit, when the limit is put on; the facts that the planner's
`BudgetError` of a step has, and its entry; or the allocator's word that it gives up. Out: an error, or a
warning, that says what was given, what holds the memory, by names that a user knows, and what would help.
Here alone the planner's facts become those of a user's step: `in_words` of eager steps, `compiled_in_words`
of compiled graphs. `lowtide.remedies` makes the text when it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn
from weakref import WeakSet

import torch

from lowtide import budget as budgets
from lowtide import private
from lowtide.budget import format_bytes
from lowtide.errors import BudgetError, PlanError
from lowtide.graph import StepGraph
from lowtide.meter.resident import bytes_under, gradient_of, own_share, workspace_bytes
from lowtide.plan import resolve
from lowtide.plan.simulate import plain
from lowtide.plan.simulate.holders import planned_holders
from lowtide.remedies import (
    BUFFERS,
    GRADIENTS,
    INPUTS,
    PARAMETERS,
    REDUCED,
    RESIDENT,
    STATE,
    UPDATE,
    WORKSPACES,
    Holder,
    in_lines,
)
from lowtide.run.limit.entry import Entry, Planned
from lowtide.run.messages import AS_IF, LEAST, OF_GRAPH, OWN_OFF, warn
from lowtide.run.scope.rules import takes
from lowtide.store.stores import Stores

OPTIMIZER_TOO = "Nor does the budget hold optimizer.step()."
"""Of a refused step, where the optimizer's own step is refused, too."""

_OF_GRAPH = {"workspace": WORKSPACES, "parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}


# ---- arguments and models ------------------------------------------------------------------------


def check_given(budget: str | int | None, policy: Any, what: str = "limit_memory") -> None:
    """Check that there is a well-written budget, or a policy that needs none.

    Raises:
        BudgetError: there is neither.
    """
    if budget is None and policy is None:
        raise BudgetError(
            f"{what} needs a budget (bytes, '600MiB' or '60%'), or a policy that works without one, such as "
            "'full'"
        )
    if budget is not None:
        budgets.check(budget)


class CallError(PlanError, TypeError):
    """``loss_fn`` takes other arguments than it will be given."""


def check_arguments(policy: Any, loss_fn: Any, stores: Any) -> None:
    """Check the types of the arguments.

    Raises:
        PlanError: one does not; a `CallError`, which is a `TypeError`, too, where ``loss_fn`` takes other
            arguments than it will be given.
    """
    if policy is not None:
        resolve(policy)
    if loss_fn is not None and not callable(loss_fn):
        raise PlanError(f"loss_fn={loss_fn!r}: give a function from the model's output to the loss")
    is_module = isinstance(loss_fn, torch.nn.Module)
    adds_arguments = is_module and private.forward_pre_hooks(loss_fn)
    if loss_fn is not None and not adds_arguments and not takes(loss_fn.forward if is_module else loss_fn, 1):
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
        raise CallError(
            f"loss_fn={name} cannot be called with one argument: it is given the model's output "
            "alone. Put the rest into a function of the output, as in loss_fn=lambda output: "
            "criterion(output, target)"
        )
    if stores is not None and not isinstance(stores, Stores):
        raise PlanError(f"stores= takes lowtide.Stores(...), not {type(stores).__name__}")


def refuse_several_devices(model: torch.nn.Module) -> None:
    """Refuse a model that is on several devices, by itself or by `torch.nn.DataParallel`: a budget is of the
    memory of one.

    Raises:
        PlanError: it is one, or holds one.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids) > 1:
            no_replicas()
    named: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.device.type != "meta":
            named.setdefault(parameter.device, name)
    if len(named) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise PlanError(
            f"the model is on several devices ({places}), and a budget is of one device's memory: move the "
            f"model to one of them, or start one process for each device (torchrun) and share the model "
            "between them, with fully_shard (FSDP2) or as pipeline stages (docs/guides/sharded.md)"
        )


def refuse_nested(entry: Entry) -> None:
    """Refuse to evict anything of a step in which nested tensors take bytes that no plan sees.

    Raises:
        PlanError: the step is one.
    """
    if entry.traits.nested:
        raise PlanError(
            f"the forward makes a nested tensor without a layout ({entry.traits.nested}), as PyTorch's "
            "attention on jagged tensors does where no fused kernel takes them (on a CPU, say). No plan "
            "counts the bytes of such tensors, so no budget below the plain step can be held. Pad the rows "
            "and mask them (x.to_padded_tensor(0.0), attn_mask=), or run attention for one row after the "
            'other (x.unbind()). A budget of "100%" runs the step as it is'
        )


def no_replicas() -> NoReturn:
    """In the place of what copies a limited model for `torch.nn.DataParallel`.

    Raises:
        PlanError: always.
    """
    raise PlanError(
        "torch.nn.DataParallel copies the model to each of its devices in every step, and no limit reaches "
        "the copies: start one process for each device (torchrun) with DistributedDataParallel and limit the "
        "model there, or run on one device without DataParallel (model.module is what it wraps)"
    )


# ---- budgets -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demand:
    """A step that is to be planned for, and what it may take.

    Attributes:
        graph: the step, with all that exists beside it.
        limit_bytes: the budget, or ``None``.
        free_bytes: what a plan leaves free of it.
        plain_peak_bytes: of the plain step, or of the largest that was planned for.
        whole_peak_bytes: what a budget in percent is of; ``None`` where it was given otherwise.
        refusal: of what an extension claims, or ``None`` where the budget holds that.
    """

    graph: StepGraph
    limit_bytes: int | None
    free_bytes: int
    plain_peak_bytes: int
    whole_peak_bytes: int | None
    refusal: BudgetError | None


def in_words(
    error: BudgetError, entry: Entry, model: torch.nn.Module, state_bytes: int, demand: Demand | None
) -> BudgetError:
    """The refusal of a step in a user's words. Facts get names that a user knows; a message stays.

    Args:
        error: the planner's, with the budget that is too small, the smallest peak of any plan and what is
            live there; or that of what an extension claims.
        entry: of the step.
        model: the limited one.
        state_bytes: of the optimizer.
        demand: the step and its budget, once these are known.
    """
    error.with_traceback(None)  # a user needs no frames of the planner, nor what they hold
    if demand is not None and error.message is None:
        error = _with_buffers(_of_step_or_optimizer(error, model, state_bytes, demand), model)
    if not entry.key.gradients:
        _add_of_later_gradients(error, model)
    if entry.traits.makes_graph:
        error.add(f"Its {OF_GRAPH}.")
    if entry.traits.checkpoints:
        error.add_first_remedy(OWN_OFF)
    return error


def _add_of_later_gradients(error: BudgetError, model: torch.nn.Module) -> None:
    """Say what gradients take in steps that begin with them, where the refused one does not."""
    made = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")]
    if more := budgets.with_slack(sum(own_share(p).nbytes for p in made)):
        error.add(
            "Where gradients exist already when a forward begins (they add up over several steps, or are "
            "cleared after it, as Lightning does), steps after the first take up to "
            f"{format_bytes(more)} ({more:,} bytes) more: give that on top."
        )


def _of_step_or_optimizer(
    error: BudgetError, model: torch.nn.Module, state_bytes: int, demand: Demand
) -> BudgetError:
    """The refusal that names the larger budget of the two: that has to do for both."""
    short, graph, free = demand.refusal, demand.graph, demand.free_bytes
    least = smallest = error.smallest_bytes or 0
    if UPDATE not in error.parts:
        least = min(plain(graph).peak_bytes + free, budgets.with_slack(smallest + free) + 1)
    if short is not None and least <= (short.smallest_bytes or 0):
        return short
    shown = dict.fromkeys(_OF_GRAPH.values(), 0)
    for storage in graph.storages:
        if storage.kind in _OF_GRAPH:
            shown[_OF_GRAPH[storage.kind]] += storage.bytes
    gradients = bytes_under([g for p in model.parameters() if (g := gradient_of(p)) is not None])
    device = torch.device(graph.device)
    error = error.stating(
        smallest_bytes=least,
        parts=_resident_by_name(error.parts, model, gradients, state_bytes, device, shown),
        plain_peak_bytes=demand.whole_peak_bytes,
    )
    if short is not None:
        error.add(OPTIMIZER_TOO)
    return error


def compiled_in_words(
    error: BudgetError,
    model: torch.nn.Module,
    device: torch.device,
    *,
    gradient_bytes: int,
    state_bytes: int,
    after_bytes: int,
    reduced_bytes: int,
) -> BudgetError:
    """The refusal of a step of compiled graphs in a user's words; what is resident before the step and has no
    name are inputs. Facts get names that a user knows; a message stays.

    Args:
        error: the planner's.
        model: the limited one.
        device: whose memory counts.
        gradient_bytes: of the gradients that existed before the step.
        state_bytes: of the optimizer.
        after_bytes: the most live bytes between backward and the optimizer's step; 0 where nothing is reduced
            then.
        reduced_bytes: of these, what ranks add gradients up in.
    """
    if error.message is not None or error.smallest_bytes is None:
        return error
    error.with_traceback(None)  # as above
    parts, had_gradients = error.parts, gradient_bytes > 0
    if after_bytes and error.smallest_bytes <= budgets.with_slack(after_bytes) + 1:  # the peak is there
        resident = after_bytes - reduced_bytes
        parts = {RESIDENT: resident, REDUCED: error.smallest_bytes - resident}
        gradient_bytes = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    parts = _resident_by_name(parts, model, gradient_bytes, state_bytes, device)
    if inputs := parts.pop(RESIDENT, 0):
        parts[INPUTS] = inputs
    error = _with_buffers(error.stating(parts=parts), model)
    if not had_gradients:
        _add_of_later_gradients(error, model)
    return error


def _with_buffers(error: BudgetError, model: torch.nn.Module) -> BudgetError:
    """The same refusal, with the name of the model's largest buffer where buffers are live at the peak."""
    named = sorted(model.named_buffers(), key=lambda one: bytes_under([one[1]]))
    size = error.parts.get(BUFFERS, 0)
    if not named or not size or not error.holders:
        return error
    name, most = named[-1]
    form = f"the largest {name!r}, {'x'.join(map(str, most.shape)) or 1} {str(most.dtype)[len('torch.') :]}"
    return error.stating(made=[*error.made, Holder(BUFFERS, size, form=form)])


def runs_least(error: BudgetError) -> str:
    """The warning of a step that runs under the plan that takes least, though it is refused."""
    return f"{LEAST} {error}"


def keeps_plan(error: BudgetError) -> str:
    """The warning of a step that took more than predicted, and for which no other plan is found."""
    return f"{AS_IF} {error}"


def _resident_by_name(
    parts: Mapping[str, int],
    model: torch.nn.Module,
    gradient_bytes: int,
    state_bytes: int,
    device: torch.device,
    shown: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """The parts of a peak, with names in place of "what else is resident" as far as its bytes go.

    Args:
        parts: what is live at the peak, in bytes by name.
        model: whose parameters and buffers these are.
        gradient_bytes: of the gradients that existed before the step.
        state_bytes: of the optimizer.
        device: whose memory counts.
        shown: how many of a name's bytes are not in "what else is resident", since the step itself has them.

    Example:
        >>> layer, cpu = torch.nn.Linear(2, 2), torch.device("cpu")
        >>> found = _resident_by_name({"what else is resident": 30}, layer, 0, 0, cpu)
        >>> found["parameters"], found["what else is resident"]
        (24, 6)
    """
    wholes = {
        WORKSPACES: workspace_bytes(device),
        STATE: state_bytes,
        PARAMETERS: bytes_under(model.parameters()),
        BUFFERS: bytes_under(model.buffers()),
        GRADIENTS: gradient_bytes,
    }
    found = dict(parts)
    rest = found.pop(RESIDENT, 0)
    for name, whole in wholes.items():
        more = min(rest, max(0, whole - (shown or {}).get(name, 0)))
        found[name] = found.get(name, 0) + more
        rest -= more
    return {name: count for name, count in (found | {RESIDENT: rest}).items() if count}


# ---- out of memory -------------------------------------------------------------------------------


class OutOfMemory:
    """Tells of limited models when their device is out of memory. PyTorch knows no way to take an observer
    away, so there is one a process: `out_of_memory`.
    """

    def __init__(self) -> None:
        self._limiters: WeakSet[Any] = WeakSet()
        self._attached = False

    def follow(self, limiter: Any) -> None:
        """Tell of this limiter's plan in force from now on; its model is on a CUDA device."""
        self._limiters.add(limiter)
        if not self._attached:
            self._attached = True
            private.on_cuda_out_of_memory(self.warn)

    def warn(self, device: int, asked_bytes: int) -> None:
        """Warn of each limited model that has a plan; ``asked_bytes`` more were not to be had."""
        for limiter in tuple(self._limiters):
            planned = limiter.cache.latest
            if planned is not None and not limiter.removed:
                state = limiter.maker.claim.resident_bytes
                warn(_out_of_memory_text(planned, state, device, asked_bytes), each_time=True)


@cache
def out_of_memory() -> OutOfMemory:
    """The observer of this process."""
    return OutOfMemory()


def _out_of_memory_text(planned: Planned, optimizer_bytes: int, device: int, asked_bytes: int) -> str:
    plan = planned.plan
    limit = "no budget" if plan.budget_bytes is None else f"a budget of {format_bytes(plan.budget_bytes)}"
    lines = [
        f"CUDA device {device} has no {format_bytes(asked_bytes)} more, in a process with a model limited "
        f"to {limit}, whose plan takes {format_bytes(plan.predicted_peak_bytes)}. A budget does not count "
        "what is beside that: other tensors, fragments of the allocator, the driver's own. Give a smaller "
        "one, or 'auto'",
        "What holds most at the plan's peak, and what frees how much:",
        *(f"  - {line}" for line in in_lines(planned_holders(planned.step_graph, plan, optimizer_bytes))),
    ]
    return "\n".join(lines)
