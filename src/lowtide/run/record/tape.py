"""The tape: recorded operations, the values they wrote, and how a value that was evicted comes back.

Everything is linked by references and nothing is registered anywhere: autograd's graph holds handles, a
handle holds a value, a value holds the node that wrote it, a node holds the values that it read. When
autograd lets its graph go, all of it goes.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from lowtide import private
from lowtide.errors import ReplayError
from lowtide.interception import compiled_recorder, unseen
from lowtide.ops import op_info
from lowtide.run.record.digest import words_of
from lowtide.run.record.random_draws import drawn_again

if TYPE_CHECKING:
    from lowtide.run.move.engine import Fetch


class LiveValue:
    """One version of one storage in a running step.

    Attributes:
        node: the operation that writes it again, or ``None`` when the value is held instead.
        held: a tensor on the stored storage; later in-place writes show in its version counter.
        version: that counter when the value was recorded.
        cached: a replayed copy that somebody still waits for.
        readers: how many nodes and saved tensors have yet to read it.
        nbytes: size of its storage.
        digest: of its bytes, where verification asks for it.
        evicted: whether autograd was to save it and did not.
        extent: how many of its storage's bytes say something: the rest was never written.
    """

    __slots__ = (
        "__weakref__", "cached", "digest", "evicted", "extent", "held", "nbytes", "node", "readers",
        "version",
    )  # fmt: skip

    def __init__(self, node: Node | Fetch | None, nbytes: int) -> None:
        self.node = node
        self.nbytes = nbytes
        self.extent = nbytes
        self.held: torch.Tensor | None = None
        self.version = 0
        self.cached: torch.Tensor | None = None
        self.readers = 0
        self.evicted = False
        self.digest: int | None = None

    @classmethod
    def stored(cls, tensor: torch.Tensor) -> LiveValue:
        """A value that stays, held by reference."""
        value = cls(None, tensor.untyped_storage().nbytes())
        value.held = private.versioned_alias(tensor)
        value.version = private.version(value.held)
        return value

    def read(self) -> None:
        """One of its readers has read it, or never will; a copy that nobody waits for any more goes."""
        if self.readers > 0:
            self.readers -= 1
            if self.readers == 0:
                self.cached = None

    def here(self) -> torch.Tensor | None:
        """A tensor on the value's bytes if they are at hand.

        Raises:
            ReplayError: the bytes that were held have been overwritten or freed since.
        """
        if self.held is None:
            return self.cached
        if private.version(self.held) != self.version:
            raise ReplayError(
                "a tensor that a recomputation starts from was modified by an in-place operation after the "
                f"forward pass (version {private.version(self.held)}, expected {self.version}, shape "
                f"{tuple(self.held.shape)}): write to a copy, or keep that region with "
                "lowtide.policies.keep_all"
            )
        if self.held.untyped_storage().nbytes() < self.nbytes:
            raise ReplayError(
                f"a tensor of {self.nbytes} bytes that a recomputation starts from has been freed since the "
                "forward pass (a sharded module frees its weights after use): put the limit on the sharded "
                "modules one by one"
            )
        return self.held


class Ref:
    """A tensor argument: a value and the geometry it is seen through."""

    __slots__ = ("conjugate", "dtype", "negative", "offset", "shape", "strides", "value")

    def __init__(self, value: LiveValue, tensor: torch.Tensor) -> None:
        self.value = value
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.strides = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conjugate = tensor.is_conj()
        self.negative = tensor.is_neg()

    def view(self, base: torch.Tensor) -> torch.Tensor:
        """This geometry over the storage of ``base``."""
        if base.dtype is not self.dtype:
            empty = torch.empty(0, dtype=self.dtype, device=base.device)
            base = empty.set_(base.untyped_storage(), self.offset, self.shape, self.strides)  # type: ignore
        elif (
            base.shape != self.shape or base.stride() != self.strides or base.storage_offset() != self.offset
        ):
            base = base.as_strided(self.shape, self.strides, self.offset)
        if base.is_conj() is not self.conjugate:
            base = private.conjugated(base)
        if base.is_neg() is not self.negative:
            base = private.negated(base)
        return base


class Standing:
    """A sparse argument, which is held as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor, private.version(tensor)

    def here(self) -> torch.Tensor:
        """The tensor.

        Raises:
            ReplayError: it was overwritten since.
        """
        if private.version(self.tensor) != self.version:
            raise ReplayError(
                "a sparse tensor that a recomputation reads was modified by an in-place operation after the "
                "forward pass: write to a copy, or keep that region with lowtide.policies.keep_all"
            )
        return self.tensor


class Node:
    """One recorded operation.

    Attributes:
        func, args, kwargs: the call, with `Ref` in place of tensors.
        order: position in the forward.
        written: for each argument that it writes: its Ref's old value, whether the old content matters, and a
            weak reference to the new value.
        outputs: for each new storage: position in the flat list of result tensors, and a weak reference to
            its value.
        statistics: positions of running statistics, which get clones in a replay.
        random_state: the generator's state before the call, for random operations.
        generator: the generator argument, if one was given.
        device: where it ran.
        exact: whether its replay starts from the very bits of the forward.
        grad: whether gradients were on, which some kernels look at.
        call: the call as the compiled recorder took it down, instead of ``args`` and ``kwargs``, or ``None``.
        claimed: whether layers that ask are told to save what it writes.
        waits: whether it counts among the readers of what it reads: until it has run once more, or is gone.
    """

    __slots__ = (
        "__weakref__", "_inputs", "args", "call", "claimed", "device", "exact", "func", "generator", "grad",
        "kwargs", "order", "outputs", "random_state",
        "statistics", "waits", "written",
    )  # fmt: skip

    def __init__(self, func: Any, order: int, device: torch.device) -> None:
        self.func = func
        self.order = order
        self.device = device
        self.exact = True
        self.args: list[Any] = []
        self.call: Any = None
        self.kwargs: dict[str, Any] = {}
        self.written: list[tuple[Ref, bool, weakref.ref[LiveValue]]] = []
        self.outputs: list[tuple[int, weakref.ref[LiveValue]]] = []
        self.statistics: tuple[int, ...] = ()
        self.random_state: bytes | None = None
        self.generator: torch.Generator | None = None
        self.grad = torch.is_grad_enabled()
        self.claimed = False
        self.waits = False
        self._inputs: list[LiveValue] | None = None

    def inputs(self) -> list[LiveValue]:
        """The values that it reads, each once; to be asked when all of the node is known."""
        if self._inputs is None:
            unseen = [ref for ref, matters, _ in self.written if not matters]
            found: dict[int, LiveValue] = {}
            for item in [*self.args, *self.kwargs.values()]:
                for ref in item if isinstance(item, list) else (item,):
                    if isinstance(ref, Ref) and not any(ref is other for other in unseen):
                        found.setdefault(id(ref.value), ref.value)
            self._inputs = list(found.values())
        return self._inputs

    def reads(self, values: list[LiveValue]) -> None:
        """All of the node is known, and these are the values that it reads."""
        self._inputs = values
        self.waits = True
        for value in values:
            value.readers += 1
            if value.node is not None and not value.node.exact:
                self.exact = False

    def has_read(self) -> None:
        """It has run again, or nobody is left who could ask for that: it is no reader any more."""
        if self.waits:
            self.waits = False
            for value in self.inputs():
                value.read()

    def __del__(self) -> None:
        if self.waits:
            self.has_read()


def flat_results(result: Any) -> list[Any]:
    """The results of an operation as a flat list."""
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in (item if isinstance(item, (tuple, list)) else (item,))]
    return [result]


def bring_back(value: LiveValue) -> torch.Tensor:
    """A tensor on the bytes of ``value``, replaying what it takes.

    Operations run in forward order, each once; an output that others wait for is cached with its value, and a
    cached value that nobody waits for any more is dropped. When the counts are used up (a second backward
    over a retained graph), everything replayed here is private to this call.

    Raises:
        ReplayError: the replay starts from a tensor that was overwritten or freed.
    """
    base = value.here()
    if base is not None:
        return base
    order: list[Node | Fetch] = []
    seen: set[int] = set()
    # Values that this call makes; those whose count says that somebody will come for them stay cached
    # afterwards.
    transient: dict[int, torch.Tensor] = {}
    stack = [value]
    while stack:
        wanted = stack.pop()
        node = wanted.node
        if node is None or id(node) in seen:
            continue
        if wanted.here() is not None:
            if wanted.cached is not None:
                transient[id(wanted)] = (
                    wanted.cached
                )  # a count used up by an earlier replay would drop it before this call has done with it
            continue
        seen.add(id(node))
        order.append(node)
        stack.extend(node.inputs())
    order.sort(key=lambda node: node.order)
    uses: dict[int, int] = {}
    for node in order:
        for source in node.inputs():
            uses[id(source)] = uses.get(id(source), 0) + 1
    uses[id(value)] = uses.get(id(value), 0) + 1
    with unseen(), private.replaying():
        for node in order:
            private.set_grad_enabled(node.grad)
            _run(node, transient, uses)
    found = transient.pop(id(value), None)
    if found is None:
        found = value.cached
    if found is None:
        raise ReplayError(
            f"replaying {order[-1].func} did not produce the value asked for: please report this"
        )
    return found


def _run(node: Node | Fetch, transient: dict[int, torch.Tensor], uses: dict[int, int]) -> None:
    """Run one recorded operation again, or fetch what was moved, and put its outputs where they are waited
    for.
    """
    if not isinstance(node, Node):
        assert node.output is not None
        _place(node.output(), node.fetch(), transient, uses)
        return
    substitutes: dict[int, torch.Tensor] = {}
    inputs = node.inputs()
    for ref, matters, _ in node.written:
        old = ref.value
        if not matters:
            blank = torch.empty(old.nbytes, dtype=torch.uint8, device=node.device)
            base = torch.empty(0, dtype=ref.dtype, device=node.device)
            base.set_(blank.untyped_storage(), ref.offset, ref.shape, ref.strides)  # type: ignore
        else:
            base = transient.get(id(old))
            if base is None:
                base = old.here()
            assert base is not None
            if old.held is not None or old.readers > 1 or uses.get(id(old), 0) > 1:
                base = _clone_storage(base, ref)
        substitutes[id(ref)] = base

    if node.call is not None:
        flat = compiled_recorder().again(node.call, [_base(node, value, transient) for value in inputs])
    else:
        args = [_argument(node, item, substitutes, transient) for item in node.args]
        kwargs = {name: _argument(node, item, substitutes, transient) for name, item in node.kwargs.items()}
        for position in node.statistics:
            if isinstance(args[position], torch.Tensor):
                args[position] = args[position].clone()
        flat = flat_results(run_again(node, args, kwargs))
        del args, kwargs
    for position, output in node.outputs:
        _place(output(), flat[position], transient, uses)
    for ref, _, output in node.written:
        _place(output(), substitutes[id(ref)], transient, uses)
    del flat, substitutes
    node.has_read()
    for source in inputs:
        left = uses.get(id(source), 0) - 1
        uses[id(source)] = left
        if left <= 0:
            transient.pop(id(source), None)


def _argument(
    node: Node, item: Any, substitutes: dict[int, torch.Tensor], transient: dict[int, torch.Tensor]
) -> Any:
    """A recorded argument with tensors in place of references."""
    if isinstance(item, Ref):
        base = substitutes.get(id(item))
        return item.view(_base(node, item.value, transient) if base is None else base)
    if isinstance(item, Standing):
        return item.here()
    if isinstance(item, list):
        return [_argument(node, part, substitutes, transient) for part in item]
    return item


def _base(node: Node, value: LiveValue, transient: dict[int, torch.Tensor]) -> torch.Tensor:
    """A tensor on a value that a replay reads."""
    base = transient.get(id(value))
    if base is None:
        base = value.here()
    if base is None:
        raise ReplayError(f"{node.func} lacks an input in its replay: please report this")
    return base


def _place(
    value: LiveValue | None, tensor: torch.Tensor, transient: dict[int, torch.Tensor], uses: dict[int, int]
) -> None:
    if value is None:
        return
    if value.readers > 0 and value.cached is None:
        value.cached = tensor
    if uses.get(id(value), 0) > 0:
        transient[id(value)] = tensor


def _clone_storage(base: torch.Tensor, ref: Ref) -> torch.Tensor:
    copy = words_of(base, torch.uint8, base.untyped_storage().nbytes()).clone()
    view = torch.empty(0, dtype=ref.dtype, device=base.device)
    return view.set_(copy.untyped_storage(), ref.offset, ref.shape, ref.strides)  # type: ignore


def run_again(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One call with the recorded random state, leaving the generator as it was; a collective is waited
    for.
    """
    if node.random_state is None:
        result = node.func(*args, **kwargs)
        return private.wait_for_collective(result) if op_info(node.func).collective else result
    return drawn_again(node, tuple(args), kwargs)
