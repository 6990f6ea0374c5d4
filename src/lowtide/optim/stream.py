"""Gradients that leave the device as backward produces them.

A hook on each parameter takes the gradient that backward has just accumulated, starts its transfer, and
leaves a `SentGradient` in `.grad`: a tensor without memory that stands for it. What backward adds to it is
added on the host; ``None`` in its place forgets it, as ever; everything else that would look at it raises.
Gradients that ranks still have to sum (sequence parallelism) stay where they are.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lowtide import private
from lowtide.extensions.moves.store.lanes import ThreadLane, Transfer
from lowtide.optim.errors import OptimError
from lowtide.optim.layout import spans
from lowtide.optim.pipeline import DEPTH, Updater
from lowtide.optim.pool import Pool
from lowtide.optim.slots import HostGradient, Slot
from lowtide.optim.tensors import check_gradient, flat_gradient, is_partial, local, sharded_like

_IN_FLIGHT_CHUNKS = 4
"""Gradients under way may take so many chunks of device memory, or twice the largest of them."""

_Kept = TypeVar("_Kept")


class SentGradient(torch.Tensor):
    """Stands in ``.grad`` for a gradient that lies on the host.

    It does not keep the optimizer alive: a parameter holds its ``.grad`` where Python's garbage collector
    cannot see it.

    Attributes:
        device_elements: the stretch of the gradient that stays on the device, flat.
    """

    device_elements: Tensor | None
    _slot: weakref.ReferenceType[Slot]
    _stream: weakref.ReferenceType[GradientStream]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Itself, as of every tensor without a history."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        raise _refusal("assigning to .data")

    @property
    def slot(self) -> Slot:
        """Whose gradient it is."""
        return _still(self._slot)

    @property
    def stream(self) -> GradientStream:
        """What sent it."""
        return _still(self._stream)

    __torch_function__ = private.no_torch_function

    @staticmethod
    def __new__(
        cls, like: Tensor, slot: Slot, stream: GradientStream, device_elements: Tensor | None
    ) -> SentGradient:
        made: Any = private.wrapper_of(cls, like.shape, like.dtype, like.device, like.stride())
        made._slot, made._stream, made.device_elements = (
            weakref.ref(slot),
            weakref.ref(stream),
            device_elements,
        )
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """There are no tensors inside: who counts memory finds none."""
        return [], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        if func is torch.ops.aten._foreach_zero_.default:
            for gradient in args[0]:
                gradient.zero_()
            return None
        if func is torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default:
            _unscale(*args)
            return None
        if isinstance(first, SentGradient) and not kwargs:
            if func is torch.ops.aten.add_.Tensor and not isinstance(args[1], SentGradient):
                first.stream.add(first, args[1])
                return first
            if func is torch.ops.aten.zero_.default:
                first.stream.zero(first)
                return first
            if func is torch.ops.aten.detach.default:
                return first
        raise _refusal(str(func))


def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """What ``GradScaler`` does to gradients, of which some are on the host: look for what is not finite, and
    divide by the scale.
    """
    pieces = [gradient for gradient in gradients if not isinstance(gradient, SentGradient)]
    on_host = list[Tensor]()
    for gradient in gradients:
        if isinstance(gradient, SentGradient):
            held = gradient.stream.current(gradient)
            if gradient.slot.updated:
                raise OptimError(
                    "overlap_update=True updates before GradScaler has looked at the gradients: use it with "
                    "overlap_update=False"
                )
            held.rescale()
            held.norm = None
            on_host.append(held.elements)
            if gradient.device_elements is not None:
                pieces.append(gradient.device_elements)
    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    if pieces:
        unscale(pieces, found_inf, inverse)
    if on_host:
        seen = torch.zeros((), dtype=torch.float32)
        unscale(on_host, seen, inverse.to("cpu"))
        found_inf.copy_(torch.maximum(found_inf, seen.to(found_inf.device)))


def _refusal(what: str) -> OptimError:
    return OptimError(
        f"{what} was asked to work on a gradient that is on the host: with stream_gradients=True gradients "
        "leave the device as backward produces them. Clip with optimizer.clip_grad_norm_(max_norm); for "
        "DistributedDataParallel, and whatever else reads or writes .grad, make the optimizer "
        "with stream_gradients=False"
    )


def sent(gradient: Tensor | None) -> SentGradient | None:
    """The stand-in that a ``.grad`` is, or holds as this process's shard."""
    if gradient is None:
        return None
    inner = local(gradient)
    return inner if isinstance(inner, SentGradient) else None


class Owner(Protocol):
    """Whose gradients they are: the optimizer."""

    def slot_of(self, parameter: Tensor) -> Slot:
        """What is kept for a parameter."""
        ...

    def gradient_sent(self, slot: Slot) -> None:
        """A gradient has been sent or added to."""
        ...


class GradientStream:
    """Sends gradients to the host.

    Args:
        updater: gives link and buffers.
        pool: where gradients lie on the host.
        keeps: gradients may simply stay where they are, since host and device memory are the same.
        owner: knows the slots, and is told when a gradient has been sent or added to.
    """

    def __init__(self, updater: Updater, pool: Pool, keeps: bool, owner: Owner) -> None:
        self.updater = updater
        self.link = updater.link
        self.pool = pool
        self.keeps = keeps
        self.norm_order: float | None = None
        self._owner = weakref.ref(owner)
        self._flying: deque[tuple[list[Transfer], int]] = deque()
        self._largest = 0
        self._sums: deque[tuple[Transfer, int]] = deque()
        """(sum under way, bytes of the gradient on the device that it still reads), the oldest first"""
        self._adding: dict[int, Transfer] = {}
        self._turn = 0
        self._fetcher, self._worker = ThreadLane("gradients-down"), ThreadLane("gradients")
        """one fetches gradients that are added, through few buffers; the other adds them up"""
        self._hooks: dict[Tensor, Any] = {}
        weakref.finalize(self, _remove, self._hooks)

    # ---- hooks -----------------------------------------------------------------------------------

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Send the gradients of these parameters from now on; those that are frozen are passed over."""
        this = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            stream = this()
            if stream is not None:
                stream._take(parameter)

        for parameter in parameters:
            if parameter.requires_grad and parameter not in self._hooks:
                self._hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    def close(self) -> None:
        """Remove the hooks, and let go of the thread."""
        _remove(self._hooks)
        self._fetcher.close()  # it asks the other one for sums
        self._worker.close()

    def _take(self, parameter: Tensor) -> None:
        """Backward has accumulated into ``.grad``."""
        gradient, owner = parameter.grad, self._owner()
        if gradient is None or owner is None or is_partial(parameter):
            return
        if sent(gradient) is not None:
            owner.gradient_sent(owner.slot_of(parameter))  # what came was added already
            return
        slot = owner.slot_of(parameter)
        if slot.host is None:
            return
        with torch.no_grad():
            parameter.grad = self.send(slot, gradient)
        owner.gradient_sent(slot)

    # ---- sending ---------------------------------------------------------------------------------

    def send(self, slot: Slot, gradient: Tensor) -> Tensor:
        """Start to move a gradient to the host; returns its stand-in."""
        check_gradient(gradient)
        piece = local(gradient).detach()  # plain: a shared gradient's own norm would be a collective
        elements = flat_gradient(piece, local(slot.parameter))
        held = self._memory(slot, elements)
        if self.norm_order is not None:
            held.norm = (self.norm_order, torch.linalg.vector_norm(piece, self.norm_order))
        if held.elements.data_ptr() != elements[slot.cut :].data_ptr():
            self._down(held, elements[slot.cut :])
            self._fly(held.transfers.copy(), held.elements.nbytes)
        on_device = elements[: slot.cut].clone() if slot.cut else None
        made = SentGradient(piece, slot, self, on_device)
        slot.placeholder = weakref.ref(made)
        return sharded_like(made, slot.parameter)

    def _memory(self, slot: Slot, elements: Tensor) -> HostGradient:
        """Where a slot's gradient goes on the host."""
        assert slot.host is not None
        if self.keeps:
            slot.gradient = HostGradient(elements[slot.cut :])
            return slot.gradient
        if slot.gradient is not None and slot.gradient.elements.dtype != elements.dtype:
            self.pool.give_back([slot.gradient.elements])
            slot.gradient = None
        if slot.gradient is None:
            slot.gradient = HostGradient(
                self.pool.zeros([(slot.host.stop - slot.host.start, elements.dtype)])[0]
            )
        slot.gradient.wait()
        slot.gradient.scales, slot.gradient.norm = [], None
        return slot.gradient

    def reserve(self, slots: Iterable[Slot], twice: bool = False) -> None:
        """Take host memory for the gradients of several slots at once.

        Args:
            slots: whose.
            twice: also for a gradient that arrives while the last one is still read.

        Raises:
            OptimError: there is not enough.
        """
        if self.keeps and not twice:
            return
        chosen = [(slot, slot.host.stop - slot.host.start) for slot in slots if slot.host is not None]
        made = iter(
            self.pool.zeros(
                [(count, slot.parameter.dtype) for slot, count in chosen for _ in range(1 + twice)]
            )
        )
        for slot, _ in chosen:
            slot.gradient = HostGradient(next(made))
            if twice:
                slot.spare = HostGradient(next(made))

    def hold(self, slot: Slot, elements: Tensor) -> HostGradient:
        """Copy the host part of a gradient that is still in ``.grad`` to the host, for an update that runs
        later.
        """
        held = slot.gradient
        if held is None or held.elements.dtype != elements.dtype:
            held = slot.gradient = HostGradient(self.pool.zeros([(elements.numel(), elements.dtype)])[0])
        self._down(held, elements)
        held.scales, held.norm = [], None
        return held

    def _down(self, held: HostGradient, elements: Tensor) -> None:
        for start, stop in spans(0, elements.numel(), self.updater.chunk_elements):
            held.transfers.append(self.link.down(held.elements[start:stop], elements[start:stop]))

    def release(self, slot: Slot) -> None:
        """Give the memory of a slot's gradients back."""
        for held in (slot.gradient, slot.spare):
            if held is not None and not self.keeps:
                self.pool.give_back([held.elements])
        slot.gradient = slot.spare = None

    def add(self, stand_in: SentGradient, gradient: Tensor) -> None:
        """Another micro-batch's gradient is added to one that is on the host."""
        slot = stand_in.slot
        held = self.current(stand_in)
        if slot.updated:
            raise OptimError(
                "backward added to a gradient whose update has begun: call step() and zero_grad() between "
                "backward passes, and do the earlier micro-batches of a step within `with "
                "optimizer.accumulating():`"
            )
        elements = flat_gradient(local(gradient), local(slot.parameter))
        if stand_in.device_elements is not None:
            stand_in.device_elements.add_(elements[: slot.cut])
        held.norm = None
        if held.scales:
            held.rescale()
        if self.link.direct:  # it has arrived
            held.elements.add_(elements[slot.cut :])
            self._norm(slot, held)
            return
        added, ready, given = Transfer(), self.link.ready(), [elements]

        def fetch() -> None:
            try:
                sums = self._fetch(given.pop(), slot, held, ready)
            except BaseException as error:
                added.finish(error)
            else:
                self._worker.do(lambda: finish(sums))

        def finish(sums: list[Transfer]) -> None:
            try:
                for one in sums:
                    one.wait()  # they are over: it raises what went wrong
                self._norm(slot, held)
            except BaseException as error:
                added.finish(error)
            else:
                added.finish()

        self._fetcher.do(fetch)
        held.transfers.append(added)
        self._bound(added, elements.nbytes)

    def _fetch(self, elements: Tensor, slot: Slot, held: HostGradient, ready: object) -> list[Transfer]:
        """Copy a gradient to the host, stretch by stretch, and have each added. Runs on the fetcher's thread,
        which waits for buffers in backward's place. Returns the sums under way.
        """
        sums: list[Transfer] = []
        for start, stop in spans(slot.cut, elements.numel(), self.updater.chunk_elements):
            turn = self._turn = self._turn + 1
            before = self._adding.pop(turn % DEPTH, None)
            if before is not None:
                before.wait()
            near = self.updater.buffer("add", turn, elements.dtype)[: stop - start]
            coming = self.link.down_after(ready, near, elements[start:stop])
            target = held.elements[start - slot.cut : stop - slot.cut]

            def add(near: Tensor = near, coming: Transfer = coming, target: Tensor = target) -> None:
                coming.wait()
                target.add_(near)

            self._adding[turn % DEPTH] = adding = self._worker.do(add)
            sums.append(adding)
        return sums

    def _bound(self, added: Transfer, size: int) -> None:
        """Bound the gradients on the device that wait to be added on the host: backward waits for the oldest
        only where they take more than may be in flight.
        """
        self._sums.append((added, size))
        self._largest = max(self._largest, size)
        while self._sums and self._sums[0][0].done:
            self._sums.popleft()
        while sum(size for _, size in self._sums) > self._limit:
            self._sums.popleft()[0].wait()

    @property
    def _limit(self) -> int:
        """Bytes that gradients in flight may take of the device."""
        return max(_IN_FLIGHT_CHUNKS * self.updater.chunk_elements * 4, 2 * self._largest)

    def _norm(self, slot: Slot, held: HostGradient) -> None:
        """Gather the norm of a gradient that was added up on the host; of a split one the device has a
        part.
        """
        if self.norm_order is not None and slot.cut == 0:
            held.norm = (self.norm_order, torch.linalg.vector_norm(held.elements, self.norm_order))

    def zero(self, stand_in: SentGradient) -> None:
        """Set a gradient to zero where it lies."""
        held = self.current(stand_in)
        held.wait()
        held.elements.zero_()
        held.scales, held.norm = [], None
        if stand_in.device_elements is not None:
            stand_in.device_elements.zero_()

    def current(self, stand_in: SentGradient) -> HostGradient:
        """What a stand-in stands for.

        Raises:
            OptimError: it is not there any more.
        """
        slot = stand_in.slot
        if slot.gradient is None or slot.placeholder is None or slot.placeholder() is not stand_in:
            raise OptimError(
                "this gradient was sent to the host and is not there any more: a later backward or step() "
                "has taken its place"
            )
        return slot.gradient

    def _fly(self, transfers: list[Transfer], size: int) -> None:
        """Bound what is under way, so that the device memory of gradients in flight does not grow with the
        model.

        The program goes on. Where the way down is slower than backward, the device waits for the oldest
        gradient before it makes more, and never because a single one is large.
        """
        self._flying.append((transfers, size))
        self._largest = max(self._largest, size)
        while self._flying and all(transfer.done for transfer in self._flying[0][0]):
            for transfer in self._flying.popleft()[0]:
                transfer.wait()  # lets go of the memory
        while sum(size for _, size in self._flying) > self._limit:
            for transfer in self._flying.popleft()[0]:
                transfer.join()


def _still(reference: weakref.ReferenceType[_Kept]) -> _Kept:
    found = reference()
    if found is None:
        raise OptimError("this gradient was sent to the host by an optimizer that is gone: set .grad to None")
    return found


def _remove(hooks: dict[Tensor, Any]) -> None:
    for handle in hooks.values():
        handle.remove()
    hooks.clear()
