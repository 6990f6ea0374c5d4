"""Trace a step that cannot run here, on fake tensors: no memory is used, and nothing of the model is changed.

In: a callable that ends in a loss. Out: a `StepGraph`, its operations timed one at a time on made-up inputs,
or priced. The values of small integer and boolean tensors are known (`lowtide.trace.contents`). The tracer is
a `TorchDispatchMode`, so ATen takes some ways that it does not take in a plain step (see
`lowtide.interception`). Every saved tensor is evicted as it is packed and a stand-in is handed out as it is
unpacked, so that the events show how long user code itself needs each storage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide import private
from lowtide.errors import TraceError
from lowtide.graph import StepGraph
from lowtide.meter.resident import workspace_bytes
from lowtide.ops import Call, has_plain_storage, is_wrapper_type, op_info, tensors_of
from lowtide.private import FakeTensor, TorchDispatchMode
from lowtide.progress import current
from lowtide.trace.contents import Contents
from lowtide.trace.costs.specs import OpCost, OpSpec, Signature, signature_of
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.tracer import Tracer
from lowtide.trace.untouched import Gradients, same_attributes, same_random

Specs = Mapping[Signature, OpSpec]
CostBySignature = Mapping[Signature, OpCost]


def trace_fake(
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    modules: list[torch.nn.Module],
    device: torch.device | str,
    costs: Callable[[Specs], CostBySignature] = measure_costs,
    without_values: Iterable[torch.Tensor] = (),
) -> StepGraph:
    """The graph of a step that runs on fake tensors, as of `lowtide.trace`.

    Args:
        step: called as ``step(*args, **kwargs)``; returns its loss, or runs backward itself.
        args, kwargs: real tensors. Of floating-point numbers only the shapes matter.
        modules: whose parameters, buffers and tensor attributes are fakes meanwhile; the first names them.
        device: whose memory the graph is about.
        costs: says what operations cost; by default they are timed one at a time on made-up inputs.
        without_values: tensors that nobody has written to.

    Raises:
        TraceError: the step has no loss, or uses values that fake tensors do not have.
    """
    faker = Faker(without_values)
    with ExitStack() as stack:
        stack.enter_context(same_random())
        stack.enter_context(private.without_fake_log())
        stack.enter_context(private.real_for_transformers(faker.contents.knows))
        stack.enter_context(with_fakes(modules, faker))
        stack.enter_context(faker.mode)
        fake_args, fake_kwargs = faker.tree((args, kwargs))
        tracer = FakeTracer(modules[0] if modules else None, device, Gradients(modules), faker.contents)
        try:
            with tracer.recording(), torch.enable_grad():
                with tracer.forward():
                    result = step(*fake_args, **fake_kwargs)
                    loss = tracer.loss_of(result)
                if loss is not None:
                    del result
                    loss.backward()
                    del loss
        except TraceError:
            raise
        except Exception as error:
            raise TraceError(
                f"the step cannot be traced on fake tensors ({type(error).__name__}: {error}): leave "
                "fake=True out"
            ) from error
        finally:
            tracer.close()
        del fake_args, fake_kwargs
    graph = tracer.graph_with(costs(tracer.specs))
    return replace(graph, resident_bytes=graph.resident_bytes + workspace_bytes(torch.device(device)))


class Faker:
    """Turns real tensors into fake ones: the same tensor always into the same fake, views of one storage into
    views of one storage.

    Args:
        without_values: tensors that nobody has written to.

    Attributes:
        mode: whose tensors the fakes are.
        contents: what is known of their values.
    """

    def __init__(self, without_values: Iterable[torch.Tensor] = ()) -> None:
        self.mode = private.fake_mode()
        self.contents = Contents()
        self._without_values = set(map(id, without_values))
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of one tensor: same geometry, device, ``requires_grad``; its ``grad`` has a fake of its
        own.
        """
        found = self._made.get(id(real))
        if found is not None:
            return found[1]
        source = real.detach() if not real.is_leaf else real
        fake = self.mode.from_tensor(source, static_shapes=True)
        if real.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        if real.is_leaf and real.grad is not None and fake.grad is None:
            fake.grad = self.tensor(real.grad)
        self._made[id(real)] = (real, fake)
        if id(real) not in self._without_values:
            self.contents.show(fake, real)
        # marks that a model sets on its parameters and asks for in forward
        for name, item in vars(real).items():
            if name not in vars(fake):
                setattr(fake, name, self.attribute(item))
        return fake

    def tree(self, items: Any) -> Any:
        """The same nest of containers with fake tensors in place of real ones."""
        return private.tree_map_only(torch.Tensor, self.tensor, items)

    def attribute(self, item: Any) -> Any:
        """What a module has as an attribute, itself where there is no tensor in it."""
        holds = any(isinstance(leaf, torch.Tensor) for leaf in private.tree_leaves(item))
        return self.tree(item) if holds else item


@contextmanager
def with_fakes(modules: list[torch.nn.Module], faker: Faker) -> Iterator[None]:
    """Give every parameter, buffer and tensor attribute of ``modules`` a fake for the length of the block."""
    with same_attributes(modules):
        for module in dict.fromkeys(module for root in modules for module in root.modules()):
            for name, item in list(vars(module).items()):
                if name != "_modules":
                    vars(module)[name] = faker.attribute(item)
        yield


def grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a product of matrices in groups returns for fake tensors: the fake kernel refuses what is not of
    bfloat16, which real ones take (mixtures of experts in float32).
    """
    shape: tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim() == 3:
        shape = (first.shape[0], *shape)
    elif first.dim() == second.dim() and offs is not None:
        shape = (offs.shape[0], *shape)
    return torch.empty(shape, dtype=out_dtype or first.dtype, device=first.device)


class _FakeSaved:
    """What autograd holds in place of a saved tensor during a trace; its end is the tensor's release."""

    __slots__ = ("again", "kept", "saved", "tracer")

    def __init__(self, tracer: FakeTracer, saved: int, tensor: torch.Tensor, droppable: bool) -> None:
        self.tracer, self.saved = tracer, saved
        geometry, options = (tensor.shape, tensor.stride()), {"dtype": tensor.dtype, "device": tensor.device}
        self.again = partial(torch.empty_strided, *geometry, **options)
        self.kept = None if droppable else tensor.detach()

    def __del__(self) -> None:
        self.tracer.releases(self.saved)


class FakeTracer(Tracer, TorchDispatchMode):
    """Records what runs on fake tensors while it is active.

    Args:
        model, device, gradients: as of `Tracer`.
        contents: what is known of the values of tensors.

    Attributes:
        specs: a call without its tensors for each signature.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        device: torch.device | str = "cpu",
        gradients: Gradients | None = None,
        contents: Contents | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        Tracer.__init__(self, model, torch.device(device), gradients)
        self.specs: dict[Signature, OpSpec] = {}
        self.contents = contents or Contents()
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled call within stays compiled."""
        return True

    @contextmanager
    def recording(self) -> Iterator[FakeTracer]:
        """Activate the dispatch mode and the module names together."""
        with self.following_modules(), self:
            yield self

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What runs in the block is the model's forward; a plan does not see what backward saves."""
        with super().forward(), private.saving(self.pack, self.unpack):
            yield

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused or self.closed or func.namespace == "prim":  # what asks for a tensor's device
            return private.call(func, args, kwargs)
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        if op_info(func).is_view:
            constant = not any(isinstance(t, FakeTensor) for t in tensors_of([args, kwargs]))
            with private.without_fake_mode() if constant else nullcontext():
                return private.call(func, args, kwargs)
        call = Call(func, args, kwargs)
        reads, evicted = self.read_by(call), self.evicted_by_scope(call)
        signature, spec = signature_of(func, args, kwargs)
        result = self.run(call)
        outputs = list(filter(has_plain_storage, tensors_of(result)))
        fresh = [outputs[position] for position in call.fresh(outputs)]
        if fresh or call.written:
            self.add_writer(call, reads, fresh, signature, returned=bool(outputs), evicted=evicted)
            if signature not in self.specs:
                sizes = [tensor.untyped_storage().nbytes() for tensor in fresh]
                self.specs[signature] = replace(spec, output_bytes=sum(sizes))
        return result

    def run(self, call: Call) -> Any:
        """What a call returns, without memory.

        Raises:
            TraceError: the call allocates what fake tensors do not show, or reads a trainable tensor that the
                trace does not know.
        """
        current().tick()
        if call.info.real_only:
            raise TraceError(
                f"{call.info.name} allocates memory that fake tensors do not show: run the step for real"
            )
        for tensor in call.inputs:
            # ``is_leaf`` of a fake view may wait for a lock that autograd holds around this very call
            if not isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf:
                raise TraceError(
                    f"the step uses a trainable tensor of shape {tuple(tensor.shape)} that the trace does "
                    "not know: pass the module that owns it as model=, or leave fake=True out"
                )
        if call.info.name == "aten._grouped_mm.default":
            return grouped_product(*call.args, **call.kwargs)
        return self.contents.run(call)

    def graph_with(self, costs: CostBySignature) -> StepGraph:
        """The graph, with what calls of each signature cost; nothing where that is not known."""
        return self.graph(
            lambda key: (costs[key].seconds, costs[key].scratch_bytes, ()) if key in costs else (0.0, 0, ())
        )

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``."""
        if self.closed or not has_plain_storage(tensor):
            return tensor
        with self._pause():
            number, droppable = self.packs(tensor)
            return _FakeSaved(self, number, tensor, droppable)

    def unpack(self, handle: Any) -> torch.Tensor:
        """Autograd asks for a saved tensor."""
        if not isinstance(handle, _FakeSaved):
            return handle
        with self._pause():
            self.unpacks(handle.saved)
            if handle.kept is not None:
                known = self.number_of(handle.kept) is not None  # the alias of a real constant is a fake
                self.hands_out(handle.saved, None if known else handle.kept.untyped_storage())
                return handle.kept
            tensor = handle.again()
            self.hands_out(handle.saved, tensor.untyped_storage())
            return tensor
