"""One micro-batch of one pipeline chunk as a `StepGraph`: traced on fake tensors with a group of ranks that
are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide import private
from lowtide.errors import LowtideError, TraceError
from lowtide.estimate.config import Config
from lowtide.estimate.devices import Device
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.simulation.pieces import DTYPES, Piece, hidden_shape
from lowtide.estimate.simulation.pricing import CALL_SECONDS, pricer
from lowtide.extensions.tiles.tile import tile
from lowtide.graph import StepGraph
from lowtide.plan.blocks import block_of
from lowtide.trace.costs.roofline import Roofline
from lowtide.trace.costs.specs import OpCost, Signature, runnable, staging_bytes
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.fake import FakeTracer
from lowtide.trace.transforms import with_collectives

SCRATCH_SECONDS = 0.2
"""How long a round of running operations for what they allocate takes; there are as many as needed."""

SCRATCH_BYTES = 1 << 30
"""The most that one of them may need then."""


@dataclass(frozen=True)
class Traced:
    """A chunk's step.

    Attributes:
        graph: one forward and backward of one micro-batch.
        split: number of events that belong to the forward.
        parameter_bytes, buffer_bytes, gradient_bytes: what was resident before it.
    """

    graph: StepGraph
    split: int
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int


class ScopedTracer(FakeTracer):
    """A trace of layers that are recomputed each as a whole, as a checkpointing scope around each would do
    it: what a layer made and saves comes back with the recomputation, so parallel layers save a gathered
        input rather than the shard that they would gather again."""

    def will_evict(self, tensor: Tensor) -> bool:
        """Whether the recomputation of a layer brings the tensor back."""
        number = self.number_of(tensor)
        producer = None if number is None else self.storages[number].producer
        return producer is not None and bool(block_of(self.operations[producer].module))


@dataclass(frozen=True)
class Ranks:
    """Who shares what is traced.

    Attributes:
        group: the ranks that share layers, or ``None``.
        context: those that share sequences, or ``None``.
    """

    group: Any = None
    context: Any = None


@contextmanager
def pretended_ranks(config: Config) -> Iterator[Ranks]:
    """The ranks of a configuration, of which only this one is there; collectives move nothing.

    Raises:
        EstimateError: torch.distributed is already set up in this process.
    """
    tp, cp = config.tp, config.cp
    if tp == cp == 1:
        yield Ranks()
        return
    if dist.is_initialized():
        raise EstimateError(
            "simulate with --tp or --cp above 1 sets up its own pretended ranks: call it where "
            "torch.distributed is not initialized"
        )
    dist.init_process_group("fake", rank=0, world_size=tp * cp, store=private.fake_store())
    try:
        shared = dist.new_group(range(tp)) if tp > 1 else None
        yield Ranks(shared, shared_context(config, dist.new_group(range(0, tp * cp, tp))))
    finally:
        dist.destroy_process_group()


def shared_context(config: Config, group: Any) -> Any:
    """How ranks share sequences, ``None`` where they do not. What attention consists of is traced."""
    if config.cp == 1 or config.cp_exchange == "all-gather":
        return None
    from lowtide.parallel.context.context import Context
    from lowtide.parallel.groups import tensor_group

    return Context(tensor_group(group), config.cp_exchange, opened=True)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made in the block have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def precision(config: Config) -> Any:
    """The context that a forward runs in."""
    return torch.autocast("cpu", torch.bfloat16) if config.dtype == "autocast" else nullcontext()


def run_forward(
    piece: nn.Module, config: Config, source: Tensor, targets: Tensor | None
) -> tuple[Any, Tensor | None]:
    """A chunk's forward: what backward begins from (an edge of autograd's graph, so that the output itself
    can be freed), and the output.
    """
    with precision(config):
        out = piece(source, targets)
    return torch.autograd.graph.get_gradient_edge(out), out


def run_backward(edge: Any, gradient: Tensor | None) -> None:
    """A chunk's backward from the gradient of its output, or from the loss."""
    torch.autograd.backward((edge,), (gradient,))


def trace_chunk(
    config: Config,
    *,
    first: bool,
    last: bool,
    with_gradients: bool,
    ranks: Ranks,
    device: Device | None = None,
    scratch: dict[Signature, OpCost] | None = None,
    whole_layers: bool = False,
    build: Callable[[], nn.Module] | None = None,
) -> Traced:
    """Trace one micro-batch of one chunk on one rank. No memory is used for tensors.

    Args:
        config: the whole configuration.
        first, last: which chunk: with the embedding, with the output layer.
        with_gradients: the parameters have gradients from a micro-batch before.
        ranks: who shares it.
        device: gives operations their seconds; without it they take none.
        scratch: run each operation once on this machine and count what it allocates meanwhile; what is known
            already, extended in place.
        whole_layers: every layer is to be recomputed as a whole.
        build: makes the chunk; the project's own models where ``None``.
    """
    mode = private.fake_mode()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(default_dtype(DTYPES[config.dtype]))
        stack.enter_context(mode)
        made = {"first": first, "last": last, "group": ranks.group, "context": ranks.context}
        piece = build() if build is not None else Piece(config, **made)
        if config.tiles > 1:
            tile([one for name, one in piece.named_modules() if name.endswith(".mlp")], config.tiles)
        if with_gradients:
            for parameter in piece.parameters():
                parameter.grad = torch.empty_like(parameter)
        with private.without_fake_mode():
            tokens = torch.zeros(config.micro_batch, config.seq, dtype=torch.long) if first else None
            targets = torch.zeros(config.micro_batch, config.seq, dtype=torch.long) if last else None
        tracer = (ScopedTracer if whole_layers else FakeTracer)(piece)
        try:
            with tracer.recording(), torch.enable_grad():
                split = _one_micro_batch(piece, config, tracer, tokens, targets)
        except LowtideError:
            raise
        except Exception as error:
            tracer.closed = True
            raise TraceError(
                f"this configuration cannot be traced ({type(error).__name__}: {error})"
            ) from error
        tracer.closed = True
        kinds = {"parameter": 0, "buffer": 0, "gradient": 0}
        for kind, tensors in (("parameter", piece.parameters()), ("buffer", piece.buffers())):
            kinds[kind] = sum(
                {private.storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values()
            )
        if with_gradients:
            kinds["gradient"] = sum(
                p.grad.untyped_storage().nbytes() for p in piece.parameters() if p.grad is not None
            )
        graph = with_collectives(tracer.graph())
    if device is not None:
        graph = _price(graph, tracer, device)
    if scratch is not None:
        graph = _with_scratch(graph, tracer, scratch)
    return Traced(graph, split, kinds["parameter"], kinds["buffer"], kinds["gradient"])


def _one_micro_batch(
    piece: nn.Module, config: Config, tracer: FakeTracer, tokens: Tensor | None, targets: Tensor | None
) -> int:
    """Forward and backward with the buffers that are received and sent; returns the number of the forward's
    events.
    """
    wide = DTYPES[config.dtype]
    source = tokens if tokens is not None else torch.zeros(hidden_shape(config), dtype=wide).requires_grad_()
    with tracer.forward():
        edge, out = run_forward(piece, config, source, targets)
    assert out is not None
    kept = out if config.keep_output_tensors else None
    shape, dtype = out.shape, out.dtype
    del out
    split = len(tracer.events)
    gradient = None if targets is not None else torch.empty(shape, dtype=dtype)
    run_backward(edge, gradient)
    del edge, gradient, kept
    source.grad = None
    del source
    return split


def _price(graph: StepGraph, tracer: FakeTracer, device: Device) -> StepGraph:
    """The graph with seconds as of the device; scratch is not known."""
    price = pricer(device)
    seconds = {signature: price(spec).seconds for signature, spec in tracer.specs.items()}
    operations = tuple(
        replace(op, seconds=seconds[signature])
        for op, signature in zip(graph.operations, tracer.signatures, strict=True)
    )
    return replace(graph, operations=operations, plain_seconds=sum(op.seconds for op in operations))


def _with_scratch(graph: StepGraph, tracer: FakeTracer, known: dict[Signature, OpCost]) -> StepGraph:
    """The graph with what operations allocate beyond their outputs while they run here, and collectives over
    Gloo.

    Raises:
        EstimateError: some cannot be run here.
    """
    here = Roofline(1e11, 1e10, CALL_SECONDS)  # orders them only
    todo = {key: spec for key, spec in tracer.specs.items() if key not in known and runnable(spec.func)}
    while todo:
        costs = measure_costs(
            todo, time_budget=SCRATCH_SECONDS, memory_limit_bytes=SCRATCH_BYTES, roofline=here
        )
        found = {key: cost for key, cost in costs.items() if cost.source == "measured"}
        if not found:
            raise EstimateError(
                f"simulate --scratch runs every operation once on this machine, and {len(todo)} of "
                f"{len(tracer.specs)} cannot be run ({next(iter(todo.values())).func} is one; "
                f"{SCRATCH_BYTES >> 30} GiB are allowed): leave it out, or give a smaller shape"
            )
        known.update(found)
        todo = {key: spec for key, spec in todo.items() if key not in found}
    operations = tuple(
        replace(
            op,
            scratch_bytes=known[signature].scratch_bytes
            if signature in known
            else staging_bytes(tracer.specs[signature]),
        )
        for op, signature in zip(graph.operations, tracer.signatures, strict=True)
    )
    return replace(graph, operations=operations)
