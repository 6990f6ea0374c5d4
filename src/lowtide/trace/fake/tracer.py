"""Record a step that runs on fake tensors.

Every saved tensor is evicted as it is packed and a stand-in is handed out as it is unpacked, so that the
events show how long the *program* needs each storage. This is a `TorchDispatchMode`, so ATen takes some ways
that it does not take in a plain step (see `lowtide.interception`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from lowtide import private
from lowtide.errors import TraceError
from lowtide.ops import has_plain_storage, is_wrapper_type, op_info, tensors_of
from lowtide.private import FakeTensor, TorchDispatchMode
from lowtide.trace.costs.specs import OpSpec, Signature, signature_of
from lowtide.trace.fake.tensors import grouped, stays_real
from lowtide.trace.tracer import Call, Tracer


class _Handle:
    """What autograd holds in place of a saved tensor during a trace; its end is the tensor's release."""

    __slots__ = ("device", "dtype", "kept", "saved", "shape", "strides", "tracer")

    def __init__(self, tracer: FakeTracer, saved: int, tensor: torch.Tensor, droppable: bool) -> None:
        self.tracer, self.saved = tracer, saved
        self.shape, self.strides = tensor.shape, tensor.stride()
        self.dtype, self.device = tensor.dtype, tensor.device
        self.kept = None if droppable else tensor.detach()

    def __del__(self) -> None:
        self.tracer.releases(self.saved)


class FakeTracer(Tracer, TorchDispatchMode):
    """Records what runs on fake tensors while it is active.

    Args:
        model: names parameters, buffers and modules.
        device: whose memory the graph is about.

    Attributes:
        signatures: for each operation, what equal calls share.
        specs: a call without its tensors for each signature.
    """

    source = "fake"

    def __init__(self, model: torch.nn.Module | None = None, device: torch.device | str = "cpu") -> None:
        TorchDispatchMode.__init__(self)
        Tracer.__init__(self, model, torch.device(device))
        self.signatures: list[Signature] = []
        self.specs: dict[Signature, OpSpec] = {}
        self._described: tuple[Signature, OpSpec] | None = None  # of the operation at hand
        # ids of storages of real tensors that numbers of fakes were written into: they hold what stood there
        # before, which no step has there
        self._stale: set[int] = set()
        self._paused = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """A compiled call within stays compiled."""
        return True

    @contextmanager
    def recording(self) -> Iterator[FakeTracer]:
        """Activate the dispatch mode, the hooks and the module names together."""
        with ExitStack() as stack:
            stack.enter_context(self.following_modules())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            stack.enter_context(self)
            yield self

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
        if self._paused or self.closed:
            return private.call(func, args, kwargs)
        if any(map(is_wrapper_type, types)):
            return NotImplemented
        if op_info(func).is_view:
            constant = not any(isinstance(t, FakeTensor) for t in tensors_of([args, kwargs]))
            with private.without_fake_mode() if constant else nullcontext():
                return private.call(func, args, kwargs)
        return self._record(func, args, kwargs)

    def run(self, call: Call) -> Any:
        """What a call returns: for real where all that it reads is small and real.

        Raises:
            TraceError: the call allocates what fake tensors do not show, or reads a trainable tensor that the
                trace does not know.
        """
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
        self._described = signature_of(call.func, call.args, call.kwargs)
        stale = self._stale and not self._stale.isdisjoint(map(self.known, call.inputs))
        if stays_real(call.info, call.inputs, call.args, call.kwargs) and not stale:
            with private.without_fake_mode():
                return private.call(call.func, call.args, call.kwargs)
        if stale or any(isinstance(tensor, FakeTensor) for tensor in call.inputs):
            real = (tensor for tensor in call.written if not isinstance(tensor, FakeTensor))
            self._stale.update(map(self._storage_of, real))
        if call.info.name == "aten._grouped_mm.default":
            return grouped(*call.args, **call.kwargs)
        return private.call(call.func, call.args, call.kwargs)

    def noted(self, call: Call, index: int, fresh: list[torch.Tensor]) -> None:
        """Beside the operation: the call without its tensors."""
        assert self._described is not None
        signature, spec = self._described
        self.signatures.append(signature)
        if signature not in self.specs:
            sizes = {private.storage_key(tensor): tensor.untyped_storage().nbytes() for tensor in fresh}
            self.specs[signature] = replace(spec, output_bytes=sum(sizes.values()))

    def will_evict(self, tensor: torch.Tensor) -> bool:
        """Whether the scope around this code brings the tensor back."""
        storage = self.known(tensor)
        return storage is not None and self._wanted(self._current[storage]) is True

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``."""
        if self.closed or not has_plain_storage(tensor):
            return tensor
        with self._pause():
            number, droppable = self.packs(tensor)
            return _Handle(self, number, tensor, droppable)

    def unpack(self, handle: Any) -> torch.Tensor:
        """Autograd asks for a saved tensor."""
        if not isinstance(handle, _Handle):
            return handle
        with self._pause():
            self.unpacks(handle.saved)
            if handle.kept is not None:
                known = self.known(handle.kept) is not None  # the alias of a real constant is a fake
                self.hands_out(handle.saved, None if known else handle.kept.untyped_storage())
                return handle.kept
            tensor = torch.empty_strided(
                handle.shape, handle.strides, dtype=handle.dtype, device=handle.device
            )
            self.hands_out(handle.saved, tensor.untyped_storage())
            return tensor
