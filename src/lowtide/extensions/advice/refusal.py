"""The planner's refusal in a user's words.

In: the facts that the planner's `BudgetError` of a step has, and its entry. Out: the same with what holds the
memory, by names that a user knows, and what would help. Here alone the planner's facts become those of a
user's step: `in_words` of eager steps, `compiled_in_words` of compiled graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lowtide import budget as budgets
from lowtide.budget import format_bytes
from lowtide.errors import BudgetError
from lowtide.meter.resident import bytes_under, gradient_of, own_share, workspace_bytes
from lowtide.plan.simulate import plain
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
)
from lowtide.run.limit.checks import Demand
from lowtide.run.limit.entry import Entry

SECOND = (
    "backward was run with create_graph=True (for a Hessian, or a penalty on gradients): its results "
    "stay live until a second backward has run, and no plan evicts them"
)
"""Why steps with second derivatives take so much."""

OWN_OFF = "turn the model's own gradient checkpointing off"
"""The first remedy where a model checkpoints on its own."""

OPTIMIZER_TOO = "The budget is too small for optimizer.step(), too."
"""Of a refused step, where the optimizer's own step is refused, too."""

_OF_GRAPH = {"workspace": WORKSPACES, "parameter": PARAMETERS, "buffer": BUFFERS, "gradient": GRADIENTS}


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
    if entry.facts.makes_graph:
        error.add(f"Its {SECOND}.")
    if entry.facts.checkpoints:
        error.add_first_remedy(OWN_OFF)
    return error


def _add_of_later_gradients(error: BudgetError, model: torch.nn.Module) -> None:
    """Say what gradients take in steps that begin with them, where the refused one does not."""
    made = [p for p in model.parameters() if p.requires_grad and not hasattr(p, "gradient_slab")]
    if more := budgets.with_slack(sum(own_share(p).nbytes for p in made)):
        error.add(
            "Most loops clear gradients before the forward. If your loop adds gradients up, or clears them "
            f"after the forward, as Lightning does, steps after the first take up to {format_bytes(more)} "
            f"({more:,} bytes) more: add these bytes to the budget."
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
