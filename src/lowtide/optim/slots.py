"""What the optimizer keeps for each parameter, and on which side."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide import private
from lowtide.extensions.moves.store.lanes import Transfer
from lowtide.optim.errors import OptimError
from lowtide.optim.kernels import Group, Kernel
from lowtide.optim.layout import cuts, granule
from lowtide.optim.pool import Pool, Spec
from lowtide.optim.tensors import check, flat, in_shape_of, local, sharded_like


@dataclass
class Before:
    """What the last update of a part replaced; on the host.

    Attributes:
        state: by name, the optimizer's state.
        values: the master, or the parameter's elements if there is no master.
        step, scalars, fresh: as of `Part`.
        kept: whether these are there, and the update is not undone yet.
    """

    state: dict[str, Tensor]
    values: Tensor
    step: Tensor
    scalars: dict[str, Any] = field(default_factory=dict)
    fresh: bool = True
    kept: bool = False

    def tensors(self) -> list[Tensor]:
        """What has as many elements as the part."""
        return [*self.state.values(), self.values]


@dataclass
class Part:
    """The stretch of a parameter that one side updates.

    Attributes:
        start, stop: its elements, counted in the order of memory.
        on_host: which side.
        state: by name, the optimizer's state of these elements.
        step: updates done, a float32 scalar.
        master: the parameter in the precision of the update, where the kernel cannot work on the parameter
            itself.
        fresh: there has been no update yet; SGD begins its momentum then.
        scalars: by name, what the kernel keeps for the parameter as a whole, in each part.
        before: memory for what an update replaces, if updates can be undone.
    """

    start: int
    stop: int
    on_host: bool
    state: dict[str, Tensor]
    step: Tensor
    master: Tensor | None
    fresh: bool = True
    scalars: dict[str, Any] = field(default_factory=dict)
    before: Before | None = None

    def tensors(self) -> list[Tensor]:
        """What it keeps for its elements."""
        return [*self.state.values(), *(() if self.master is None else (self.master,))]


@dataclass
class HostGradient:
    """A gradient on the host.

    Attributes:
        elements: of the host part, in the gradient's own precision.
        transfers: under way into it.
        scales: factors that clipping asked for and that have not been applied, in order.
        norm: of the whole gradient of this process, and of which order, where it has been gathered.
    """

    elements: Tensor
    transfers: list[Transfer] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)
    norm: tuple[float, Tensor] | None = None

    def wait(self) -> None:
        """Return when the gradient is there; raises what a transfer raised."""
        waiting, self.transfers = self.transfers, []
        for transfer in waiting:
            transfer.wait()

    def rescale(self) -> None:
        """Apply what clipping asked for."""
        self.wait()
        for scale in self.scales:
            self.elements.mul_(scale)
        self.scales = []


class Slot:
    """One parameter with its one or two parts.

    Attributes:
        parameter: the parameter.
        cut: the elements that the device updates.
        elements: of the parameter, in this process.
        device, host: the parts; ``None`` where there are no elements.
        gradient: what is on the host of the gradient that `.grad` stands for, or ``None``.
        spare: another one's memory, for gradients that arrive while an update still reads the last.
        placeholder: what is in `.grad` in its place, if anything.
        version: the parameter's version counter after our last write; another one means that somebody wrote
            to it.
        pending: the host part holds an update that the parameter has not seen.
        updated: the host part has been updated ahead of `step`.
        shown: ``optimizer.state`` has its state.
        stepped: the number of the step that updated it last.
    """

    def __init__(self, parameter: Tensor, cut: int) -> None:
        self.parameter = parameter
        self.cut = cut
        self.elements = local(parameter).numel()
        self.device: Part | None = None
        self.host: Part | None = None
        self.gradient: HostGradient | None = None
        self.spare: HostGradient | None = None
        self.placeholder: weakref.ReferenceType[Any] | None = None
        self.version = -1
        self.pending = False
        self.updated = False
        self.shown = False
        self.stepped = 0

    def parts(self) -> list[Part]:
        """The parts that there are."""
        return [part for part in (self.device, self.host) if part is not None]

    def values(self, start: int, stop: int) -> Tensor:
        """The parameter's elements from ``start`` to ``stop``, on the device."""
        elements = flat(local(self.parameter))
        return elements if stop - start == elements.numel() else elements[start:stop]

    def wrote(self) -> None:
        """The parameter is as we left it."""
        self.version = private.version(local(self.parameter))

    def written_by_others(self) -> bool:
        """Whether somebody else wrote to the parameter since our last write."""
        return private.version(local(self.parameter)) != self.version

    def join(self, name: str) -> Tensor | tuple[Tensor, Tensor]:
        """A piece of state in the parameter's shape, or as (device, host) stretches where it is split."""
        found = [part.state[name] if name != "master" else part.master for part in self.parts()]
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) == 2:
            return pieces[0], pieces[1]
        return sharded_like(in_shape_of(pieces[0], local(self.parameter)), self.parameter)

    def whole(self, name: str) -> Tensor:
        """A piece of state in the parameter's shape; where it is split, a copy in main memory."""
        found = self.join(name)
        if not isinstance(found, tuple):
            return found
        together = torch.cat([piece.to("cpu") for piece in found])
        return sharded_like(in_shape_of(together, local(self.parameter)), self.parameter)


@dataclass
class Placement:
    """How to give parameters their slots.

    Args:
        kernel: whose state is kept.
        pool: where the host parts lie.
        masters: keep 16-bit parameters in float32 beside them.
        host_copies: the host keeps its own copy of parameters even where it could write to them.
    """

    kernel: Kernel
    pool: Pool
    masters: bool
    host_copies: bool

    def update_dtype(self, parameter: Tensor) -> torch.dtype:
        """The precision in which a parameter is updated."""
        return torch.float32 if self.masters and parameter.dtype.itemsize == 2 else parameter.dtype

    def device_bytes_per_element(self, parameter: Tensor, group: Group) -> int:
        """What the device keeps for an element that it updates, the parameter and its gradient apart."""
        dtype = self.update_dtype(parameter)
        count = len(self.kernel.names(group)) + (dtype != parameter.dtype)
        return count * dtype.itemsize

    def host_specs(self, parameter: Tensor, group: Group, elements: int) -> list[Spec]:
        """What the host keeps for elements that it updates; the master, if any, last."""
        dtype = self.update_dtype(parameter)
        count = len(self.kernel.names(group)) + (self.host_copies or dtype != parameter.dtype)
        return [(elements, dtype)] * count

    def place(self, parameters: Sequence[tuple[Tensor, Group]], host_fraction: float) -> dict[Tensor, Slot]:
        """Slots for parameters, split between the sides.

        Raises:
            OptimError: a parameter that cannot be split, or not enough memory; then nothing is kept.
        """
        for parameter, _ in parameters:
            check(parameter)
        pieces = [local(parameter) for parameter, _ in parameters]
        kept = cuts(
            [piece.numel() for piece in pieces],
            [granule(piece.dtype, self.kernel.granule) for piece in pieces],
            host_fraction,
        )
        slots = [Slot(parameter, cut) for (parameter, _), cut in zip(parameters, kept, strict=True)]
        specs = [
            self.host_specs(piece, group, piece.numel() - slot.cut)
            for slot, piece, (_, group) in zip(slots, pieces, parameters, strict=True)
        ]
        on_host = iter(self.pool.zeros([spec for some in specs for spec in some if spec[0]]))
        try:
            for slot, piece, (_, group) in zip(slots, pieces, parameters, strict=True):
                if slot.cut:
                    slot.device = self._device_part(piece, group, slot.cut)
                if slot.cut < piece.numel():
                    slot.host = self._host_part(piece, group, slot.cut, on_host)
        except BaseException as error:
            self.pool.give_back(list(on_host))
            self.forget(slots)
            if isinstance(error, RuntimeError) and not isinstance(error, OptimError):
                raise OptimError(
                    f"no room on the device for the optimizer's state there ({error}): raise host_fraction"
                ) from error
            raise
        return {slot.parameter: slot for slot in slots}

    def forget(self, slots: Iterable[Slot]) -> None:
        """Give the host memory of slots back."""
        for slot in slots:
            if slot.host is not None:
                self.pool.give_back(slot.host.tensors())

    def _device_part(self, piece: Tensor, group: Group, elements: int) -> Part:
        dtype = self.update_dtype(piece)
        state = {
            name: torch.zeros(elements, dtype=dtype, device=piece.device) for name in self.kernel.names(group)
        }
        master = torch.empty(elements, dtype=dtype, device=piece.device) if dtype != piece.dtype else None
        return Part(
            0, elements, False, state, torch.zeros((), dtype=torch.float32, device=piece.device), master
        )

    def _host_part(self, piece: Tensor, group: Group, start: int, memory: Any) -> Part:
        specs = self.host_specs(piece, group, piece.numel() - start)
        state = {name: next(memory) for name in self.kernel.names(group)}
        master = next(memory) if len(specs) > len(state) else None
        return Part(start, piece.numel(), True, state, torch.zeros((), dtype=torch.float32), master)
