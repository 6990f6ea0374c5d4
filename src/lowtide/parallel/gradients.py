"""Gradients that are parts of a sum: their mark, their sum over the ranks, and the guard against a step
without it.

Under sequence parallelism a rank sees its piece of the sequence, so the gradient of what is used there (layer
norms, the bias behind a row-parallel layer) is a part of a sum over the ranks. The same holds for key and
value heads that several ranks share, and under context parallelism for all parameters. Such parameters are
marked ``parameter.sequence_parallel_enabled = True``, as neuronx-distributed marks them. After the last
backward of a step, `allreduce_sequence_parallel_gradients` sums them. An optimizer that is about to step
without it is stopped.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lowtide import private
from lowtide.errors import expect
from lowtide.parallel.collectives import all_reduce
from lowtide.parallel.errors import ParallelError
from lowtide.parallel.given import check_counts, check_tensors, parameters_of
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.shared import watch_gradients

BUFFER_BYTES = 32 * 2**20


class _Mark:
    """What is known of the gradient of one marked parameter.

    Attributes:
        groups: the ranks whose parts make up the sum: first those of the first group are summed, then those
            of the next.
        partial: a backward has added a part since the last sum.
        summed: the gradient that holds a finished sum, and its version.
        mixed: a backward added a part to a finished sum.
        passed: autograd has made a part that no backward has added (``torch.autograd.grad``).
        watches: it hears of every backward. Dynamo can ask for this, and not for the hook.
    """

    __slots__ = ("_passes", "groups", "hook", "mixed", "partial", "passed", "summed", "watches")

    def __init__(self) -> None:
        self.groups: tuple[TensorGroup, ...] = ()
        self.partial = False
        self.mixed = False
        self.passed = False
        self.summed: tuple[weakref.ref[Tensor], int] | None = None
        self.hook: Any = None
        self.watches = False

    def __reduce__(self) -> Any:
        return _no_mark, ()

    @property
    def ranks(self) -> int:
        """How many parts there are."""
        return math.prod(group.size for group in self.groups)

    def watch(self, parameter: Tensor) -> None:
        """Hear of every backward that adds to the gradient, from when the parameter is trained."""
        if self.hook is None and parameter.requires_grad:
            self.hook, self.watches = parameter.register_post_accumulate_grad_hook(self.added), True
            self._passes = parameter.register_hook(self.passes)

    def stop(self) -> None:
        """Hear of no backward any more."""
        if self.hook is not None:
            self.hook.remove()
            self._passes.remove()

    def passes(self, part: Tensor) -> None:
        """Autograd has made a part, which a backward adds, or the program may."""
        self.passed = True

    def assigned(self) -> None:
        """The program has written to ``parameter.grad``: a part, where autograd has just made one."""
        if self.passed:
            self.partial, self.passed = True, False

    def added(self, parameter: Tensor) -> None:
        """A backward has added to the parameter's gradient."""
        if self.summed is not None and parameter.grad is not None:
            gradient, version = self.summed
            # one write since the sum is this very addition; a zero_() before it would make two
            if gradient() is parameter.grad and private.version(parameter.grad) == version + 1:
                self.mixed = True
        self.summed = None
        self.partial, self.passed = True, False

    def done(self, parameter: Tensor) -> None:
        """The gradient holds the sum."""
        self.partial = self.passed = False
        if parameter.grad is not None:
            self.summed = (weakref.ref(parameter.grad), private.version(parameter.grad))


def mark_partial_gradient(parameter: Tensor, group: Any = None) -> None:
    """Say that the gradient of ``parameter`` on one rank is a part of a sum over ``group``.

    Marking a marked parameter again does nothing; with another group, the sum is over both. In a group of one
    nothing is partial, and nothing is marked.

    >>> weight = torch.nn.Parameter(torch.ones(2))
    >>> mark_partial_gradient(weight)
    >>> partial_gradients([weight])
    []
    """
    check_tensors("mark_partial_gradient", parameter=parameter)
    group = tensor_group(group)
    if group.size == 1:
        return
    mark = _mark_of(parameter)
    if mark is None:
        mark = _Mark()
        parameter.sequence_parallel_enabled = True  # type: ignore[attr-defined]
        parameter._lowtide_partial = mark  # type: ignore[attr-defined]
        watch_gradients(parameter)
        _guard_optimizers()
    if group not in mark.groups:
        mark.groups = (*mark.groups, group)
    mark.watch(parameter)


def unmark_partial_gradient(parameter: Tensor, group: TensorGroup) -> None:
    """Say that someone else sums the gradient of ``parameter`` over ``group``.

    >>> unmark_partial_gradient(torch.nn.Parameter(torch.ones(2)), tensor_group())
    """
    mark = _mark_of(parameter)
    if mark is not None and group in mark.groups:
        mark.groups = tuple(other for other in mark.groups if other != group)
        if not mark.groups:
            mark.stop()
            del parameter._lowtide_partial, parameter.sequence_parallel_enabled  # type: ignore[attr-defined]


class Marker:
    """Keeps the marks on some of a module's parameters, over copies of the module and over what replaces its
    parameters.

    It is a forward pre-hook of the module: it marks the parameters of a copy, and stops a module whose
    parameters were replaced without being marked again, since their gradients would stay parts of a sum.

    Args:
        module: whose parameters.
        names: which of them.
        group: the ranks whose parts make up the sum.
    """

    def __init__(self, module: torch.nn.Module, names: Iterable[str], group: TensorGroup) -> None:
        self.names = tuple(names)
        self.group = group
        self._owner = 0
        self._by_hand = False
        self.mark(module)
        module.register_forward_pre_hook(self)

    def mark(self, module: torch.nn.Module, by_hand: bool = False) -> None:
        """Mark the module's parameters as they are now."""
        self._owner, self._by_hand = id(module), by_hand
        for name in self.names:
            parameter = getattr(module, name)
            if parameter is not None:
                mark_partial_gradient(parameter, self.group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._owner = 0

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() and all(map(_is_watched, map(module.__getattr__, self.names))):
            return  # Dynamo cannot trace what follows, and there is nothing to do
        if self._owner != id(module):
            self.mark(module)
            return
        for name in self.names:
            parameter = getattr(module, name)
            if parameter is None:
                continue
            mark = _mark_of(parameter)
            if mark is not None:
                mark.watch(parameter)
            elif not self._by_hand:
                raise ParallelError(
                    f"{name} of {type(module).__name__} was replaced after it was marked (by fully_shard?), "
                    "so its gradient would stay this rank's part of a sum: call "
                    "lowtide.parallel.mark_partial_gradients(model) after replacing parameters"
                )


def mark_partial_gradients(model: torch.nn.Module) -> None:
    """Mark the parameters of a shared model again, after something replaced them (``fully_shard`` does).

    >>> mark_partial_gradients(torch.nn.Linear(2, 2))
    """
    module = isinstance(model, torch.nn.Module)
    expect(module, "mark_partial_gradients(model=)", model, "a torch.nn.Module", ParallelError)
    for module in model.modules():
        for hook in private.forward_pre_hooks(module):
            if isinstance(hook, Marker):
                hook.mark(module, by_hand=True)


def move_model_to_device(model: torch.nn.Module, device: torch.device | str) -> None:
    """Move a shared model. It knows afterwards, too, which parts of its parameters this rank holds, which
    gradients are parts of a sum, and which parameters are one.

    Args:
        model: shared or not.
        device: where to.

    Raises:
        ParallelError: the model is no module.

    >>> move_model_to_device(torch.nn.Linear(2, 2), "cpu")

    Source: neuronx-distributed, ``parallel_layers.utils.move_model_to_device``.
    """
    module = isinstance(model, torch.nn.Module)
    expect(module, "move_model_to_device(model=)", model, "a torch.nn.Module", ParallelError)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to(device)  # which may replace parameters
    for first, *others in names.values():
        for name in others:
            owner, _, own = name.rpartition(".")
            setattr(model.get_submodule(owner), own, model.get_parameter(first))
    mark_partial_gradients(model)


def partial_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Those of the parameters whose gradients are marked as parts of a sum.

    Raises:
        ParallelError: they are no tensors.
    """
    found = parameters_of("partial_gradients", parameters)
    return [parameter for parameter in found if _mark_of(parameter) is not None]


def note_added(parameters: Iterable[Tensor]) -> None:
    """Say that a backward has added to the marked gradients among these, where it wrote them behind
    autograd's hooks (zero-bubble schedules).
    """
    for parameter in partial_gradients(parameters):
        mark = _mark_of(parameter)
        if mark is not None and parameter.grad is not None and not mark.partial:
            mark.added(parameter)


def allreduce_sequence_parallel_gradients(
    optimizer: torch.optim.Optimizer | torch.nn.Module, *, buffer_bytes: int = BUFFER_BYTES
) -> int:
    """Sum the marked gradients over their ranks. Call it once a step: after the last backward, before
    clipping and ``optimizer.step()``.

    Args:
        optimizer: whose parameters to look at; a module does, too.
        buffer_bytes: the most bytes that travel at once. However many gradients there are, one buffer of at
            most this size (and a copy that the collective makes of it) is all that is allocated.

    Returns:
        How many gradients were summed.

    Raises:
        ParallelError: a backward has added to a gradient that was summed already, which would count the first
            part once per rank.

    Source: neuronx-distributed's function of that name; constant-size buffers are those of ZeRO-R (arXiv
        1910.02054, section 6.2).
    """
    known = isinstance(optimizer, torch.nn.Module | torch.optim.Optimizer)
    expect(known, "optimizer=", optimizer, "an optimizer, or a torch.nn.Module", ParallelError)
    check_counts("allreduce_sequence_parallel_gradients", 1, buffer_bytes=buffer_bytes)
    groups: dict[tuple[TensorGroup, ...], list[Tensor]] = {}
    for parameter in partial_gradients(_parameters_of(optimizer)):
        mark = _mark_of(parameter)
        assert mark is not None
        if mark.mixed:
            raise ParallelError(
                f"a gradient of shape {tuple(parameter.shape)} was summed over the ranks, and a backward has "
                "added to it since: call allreduce_sequence_parallel_gradients once, after the last "
                "backward of the step (zero the gradients to go on)"
            )
        if parameter.grad is not None and (mark.partial or mark.hook is None):
            groups.setdefault(mark.groups, []).append(parameter)
    for several, parameters in groups.items():

        def summed(part: Tensor, several: tuple[TensorGroup, ...] = several) -> Tensor:
            for group in several:
                part = all_reduce(part, group, in_place=True).wait()
            return part

        reduce_together(parameters, summed, buffer_bytes)
        for parameter in parameters:
            mark = _mark_of(parameter)
            assert mark is not None
            mark.done(parameter)
    return sum(map(len, groups.values()))


def _flat_gradient(parameter: Tensor) -> Tensor:
    """What this process holds of the gradient (FSDP may have sharded it), as a vector on the same bytes."""
    gradient: Any = parameter.grad
    local = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).detach()
    if not local.is_contiguous():
        order = sorted(range(local.ndim), key=local.stride, reverse=True)
        local = local.permute(order)
    return local.view(-1)


@torch.no_grad()
def reduce_together(
    parameters: Iterable[Tensor], reduce: Callable[[Tensor], Tensor], buffer_bytes: int
) -> int:
    """Put what ``reduce`` makes of the parameters' gradients in their place, through a buffer of at most so
    many bytes; how many gradients there were.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            kind = parameter.grad.dtype, parameter.grad.device
            kinds.setdefault(kind, []).append(_flat_gradient(parameter))
    for (dtype, device), gradients in kinds.items():
        length = _buffer_length(dtype, (gradient.numel() for gradient in gradients), buffer_bytes)
        buffer = reduced = None  # the last one's, before there is another
        buffer = torch.empty(length, dtype=dtype, device=device)
        for pieces in _buffers_of(gradients, length):
            at = 0
            for flat, start, stop in pieces:
                buffer[at : at + stop - start].copy_(flat[start:stop])
                at += stop - start
            reduced = reduce(buffer[:at])
            at = 0
            for flat, start, stop in pieces:
                flat[start:stop].copy_(reduced[at : at + stop - start])
                at += stop - start
    return sum(map(len, kinds.values()))


def reduced_bytes(parameters: Iterable[Tensor], buffer_bytes: int = BUFFER_BYTES) -> int:
    """The most bytes that gradients of these parameters take once more while they are reduced together.

    >>> reduced_bytes([torch.nn.Parameter(torch.ones(3)), torch.ones(5)])
    12
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    own: Any
    for own in parameters:
        if own.requires_grad:
            local = own.to_local() if hasattr(own, "to_local") else own  # of a sharded one, this share
            kinds.setdefault((own.dtype, own.device), []).append(local.numel())
    most = ((kind, _buffer_length(kind[0], counts, buffer_bytes)) for kind, counts in kinds.items())
    return max((dtype.itemsize * length for (dtype, _), length in most), default=0)


def _buffer_length(dtype: torch.dtype, counts: Iterable[int], buffer_bytes: int) -> int:
    """Elements of the buffer for gradients of so many elements each."""
    return max(1, min(buffer_bytes // dtype.itemsize, sum(counts)))


def _buffers_of(gradients: list[Tensor], length: int) -> Iterator[list[tuple[Tensor, int, int]]]:
    """Flat gradients as (gradient, start, stop), in lists that fill a buffer of ``length`` elements each."""
    batch: list[tuple[Tensor, int, int]] = []
    room = length
    for gradient in gradients:
        start = 0
        while start < gradient.numel():
            stop = min(gradient.numel(), start + room)
            batch.append((gradient, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield batch
                batch, room = [], length
    if batch:
        yield batch


def _no_mark() -> None:
    """What a pickled mark becomes; the module that owns the parameter marks it again."""


def _is_watched(parameter: Any) -> bool:
    """Whether there is nothing to mark: it is marked, and heard of if it is trained."""
    mark = _mark_of(parameter)
    return parameter is None or (mark is not None and (mark.watches or not parameter.requires_grad))


def _mark_of(parameter: Any) -> _Mark | None:
    return getattr(parameter, "_lowtide_partial", None)


def _parameters_of(optimizer: Any) -> Iterator[Tensor]:
    if isinstance(optimizer, torch.nn.Module):
        yield from optimizer.parameters()
        return
    for group in optimizer.param_groups:
        yield from group["params"]


def _refuse_partial(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: no gradient that it is about to use may be a part of a sum."""
    for parameter in _parameters_of(optimizer):
        mark = _mark_of(parameter)
        if mark is not None and parameter.grad is not None and (mark.partial or mark.mixed):
            raise ParallelError(
                "optimizer.step() with a gradient that is only this rank's part of a sum (a parameter of "
                f"shape {tuple(parameter.shape)} shared by {mark.ranks} ranks): call "
                "lowtide.parallel.allreduce_sequence_parallel_gradients(optimizer) after backward"
            )


_refuse_partial.registered = False  # type: ignore[attr-defined]


def _guard_optimizers() -> None:
    """Look at the gradients before every optimizer's step; it touches only parameters that are marked."""
    if not _refuse_partial.registered:  # type: ignore[attr-defined]
        register_optimizer_step_pre_hook(_refuse_partial)
        _refuse_partial.registered = True  # type: ignore[attr-defined]
