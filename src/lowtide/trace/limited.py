"""Trace a step of a model that is about to be limited: its forward is the region that can be planned, its loss may lie outside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.private import fake_errors_untold, is_compiled
from lowtide.trace.answers import Answers, hear
from lowtide.trace.chance import BY_CHANCE, Chance, same_random
from lowtide.trace.costs import OpCost, measure_costs
from lowtide.trace.describe import Signature, plain_leaves, tensors_inside
from lowtide.trace.eager import Tracer
from lowtide.trace.fake import Faker, borrowed
from lowtide.trace.given import given_loss
from lowtide.trace.leaks import nothing_outside
from lowtide.trace.real import Packing, trace_real
from lowtide.trace.standin import stand_in
from lowtide.trace.step import device_of, model_loss_of, with_costs

ANSWERED = "what the model asks of its tensors is answered as in one forward of the same batch"
"""A note of a graph that other numbers in tensors of the same shapes may make another one."""

_NO_HOOKS = "don't yet support saved tensor hooks"
LOSS_OUTSIDE = "the loss lies outside the model and was stood in for by one of its outputs"


@dataclass(frozen=True)
class TimingRoom:
    """What timing operations one at a time may take; ``None`` is as much as it takes.

    Attributes:
        operation_bytes: inputs and outputs of one operation; a larger one is estimated.
        held_bytes: those and the earlier outputs that are held meanwhile.
    """

    operation_bytes: int | None = None
    held_bytes: int | None = None


def trace_model(
    model: torch.nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    cost_cache: dict[Signature, OpCost] | None = None,
    small: Callable[[torch.nn.Module], tuple[Packing, Callable[[], Any]]] | None = None,
    timing_room: Callable[[StepGraph], TimingRoom] | None = None,
    claims: frozenset[int] = frozenset(),
    astray: bool = False,
    hears: bool = True,
    outside: Sequence[int] | None = None,
) -> StepGraph:
    """The step graph of ``loss_fn(forward(*args, **kwargs))`` and its backward.

    Fake tensors are tried first. A model that asks what is in them runs one forward for real, of which nothing is saved, and is answered as
    there. A model that cannot be followed so runs one extra step for real, kept small by the executor that ``small`` makes. Gradients,
    buffers and random state are put back. A loss that lies outside is stood in for by one of all outputs.

    Args:
        model: owns the parameters.
        forward: its own forward.
        args, kwargs: of the step, real tensors.
        loss_fn: from the output to the loss.
        cost_cache: costs already known, extended in place.
        small: makes the executor for a real trace.
        timing_room: from the graph, still without costs, to the bytes that timing its operations may take.
        claims: as of `lowtide.trace.eager.Tracer`; a trace for real takes none.
        astray: a step has shown that the model takes another way on fake tensors: do not try them.
        hears: the model may run its forward alone, as one that is shared with other processes may not.
        outside: how gradients come from a loss outside, as of `lowtide.trace.standin.stand_in`.

    Raises:
        TraceError: no output requires a gradient, or what ``loss_fn`` returns is no loss of this model.
    """
    notes: list[str] = []

    def loss_from(result: Any) -> torch.Tensor:
        if loss_fn is not None:
            return given_loss(loss_fn, result, model)
        loss = model_loss_of(result)
        if loss is None:
            loss = stand_in(result, outside)
            notes.append(LOSS_OUTSIDE)
        return loss

    def run(tracer: Tracer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in tensors_inside((args, kwargs)):
            tracer.value_of(tensor)  # it stands on the device, used or not
        result = forward(*args, **kwargs)
        tracer.in_region = False
        loss = loss_from(result)
        tracer.answers.end()
        tracer.outputs.hold(result, loss)
        del result
        tracer.outputs.let_go()
        (loss.sum() if loss.dim() else loss).backward()

    def once(chance: Chance) -> Tracer:
        notes.clear()
        if astray:
            notes.append("traced for real: on fake tensors the model takes another way")
        elif not any(is_compiled(module) for module in model.modules()):
            answers = Answers()
            try:
                return _fake(run, model, args, kwargs, claims, chance, answers)
            except TraceError as error:
                reason = str(error)
            if answers.missed and hears:
                try:
                    answers = hear(lambda: loss_from(forward(*args, **kwargs)), model, chance)
                    notes[:] = [ANSWERED]
                    return _fake(run, model, args, kwargs, claims, chance, answers)
                except Exception as error:  # whatever it is, the step for real will show it
                    reason = str(error)
            notes[:] = [f"traced for real: {reason}"]
        inner, below = small(model) if small is not None else (None, None)
        try:
            return trace_real(lambda tracer: run(tracer, args, kwargs), [model], model, inner, below, chance)
        except RuntimeError as error:
            if _NO_HOOKS not in str(error):
                raise
            raise TraceError(
                "the model calls torch.func.grad, vjp, jacrev or the like in its forward, which PyTorch does not do where anything stands between "
                "autograd and what it saves: use torch.autograd.grad(..., create_graph=True) there, or put the limit on the modules around it"
            ) from error

    found: list[tuple[Tracer, tuple[str, ...]]] = []
    refused = 0
    for least in (False, True, None):  # a layer may be left out for a high number, or for a low one
        if least is None and found:
            break
        chance = Chance(least)
        try:
            found.append((once(chance), tuple(notes)))
        except Exception:  # nothing may be left of it, or the model may make no sense of such a number
            refused += 1
            if least is None or not (chance.drew or found):
                raise
        if not chance.drew:
            break
    tracer, said = max(found, key=lambda way: len(way[0].operations))
    if len({len(way.operations) for way, _ in found}) + refused > 1:
        said = (*said, BY_CHANCE)
    graph = tracer.graph(device=device_of([model], args), source="fake" if tracer.fake else "real", notes=said)
    room = timing_room(graph) if timing_room is not None else TimingRoom()
    costs = measure_costs(
        tracer.specs,
        cache=cost_cache,
        memory_limit_bytes=room.operation_bytes,
        held_limit_bytes=room.held_bytes,
        standing=[leaf for tensor in (*model.parameters(), *tensors_inside((args, kwargs))) for leaf in plain_leaves(tensor.detach())],
    )
    return with_costs(graph, tracer, costs)


def _fake(
    run: Callable[..., None],
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    claims: frozenset[int],
    chance: Chance,
    answers: Answers,
) -> Tracer:
    faker = Faker()
    with ExitStack() as stack:
        stack.enter_context(same_random(modules=[model], chance=chance))
        stack.enter_context(fake_errors_untold())
        outside = stack.enter_context(nothing_outside(faker, [model], run))
        stack.enter_context(borrowed([model], faker))
        with faker.mode:
            fake_args, fake_kwargs = faker.tree(args), faker.tree(kwargs)
            tracer = outside.tracer = Tracer(model, fake=True, claims=claims, chance=chance, answers=answers)
            try:
                with tracer.recording(), torch.enable_grad():
                    run(tracer, fake_args, fake_kwargs)
            except TraceError:
                raise
            except Exception as error:
                raise TraceError(f"{type(error).__name__}: {error}") from error
            finally:
                tracer.closed = True
            del fake_args, fake_kwargs
    return tracer
