"""Record a running forward on the tape, and evict the tensors that autograd saves.

`Recorder` is the interceptor and the pair of saved-tensor hooks of one forward. A director
(`lowtide.run.record.directors`) decides what is recorded and which results stay: one follows a plan, another
a scope's rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.interception import Interceptor, proceed, unseen
from lowtide.ops import (
    OpInfo,
    covers_storage,
    draws,
    has_plain_storage,
    hidden_statistics,
    is_sparse,
    is_wrapper,
    op_info,
    tensors_of,
    written_tensors,
)
from lowtide.run.digest import digest, reach
from lowtide.run.move.engine import TransferEngine
from lowtide.run.record.directors import Director, PlanDirector, RegionDirector
from lowtide.run.record.handles import AroundUnpack, Attributed, Evicted, Kept, Wrapped, unpack
from lowtide.run.record.native import compiled
from lowtide.run.record.random_draws import drawn
from lowtide.run.record.replay import flat_results
from lowtide.run.record.tape import Fetch, LiveValue, Node, Ref, SparseInput, Writer
from lowtide.run.record.verify import Findings, copied, on_a_copy, why_not_reproduced


class Recorder(Interceptor):
    """Intercepts the operations of one forward, or of one region of it.

    Args:
        director: decides what is recorded and what stays.
        verify: run every recorded operation twice and compare, and check evicted values for writes that the
            dispatcher did not see.
        check: compare every replayed tensor with the digest of the original; ``None`` is as ``verify``.
        around_unpack: makes the call that brings an evicted tensor back.
        mover: carries out the plan's moves.
        program: the plan's, as the compiled recorder knows it (`lowtide.run.record.native`), or ``None``.
            Verifying and checking are done in Python.
    """

    def __init__(
        self,
        director: Director,
        *,
        verify: bool = False,
        check: bool | None = None,
        around_unpack: AroundUnpack | None = None,
        mover: TransferEngine | None = None,
        program: Any = None,
    ) -> None:
        private.keep_dynamo_out()
        self.director = director
        self.verify = verify
        self.check = verify if check is None else check
        self.around_unpack = around_unpack
        self.mover = mover
        self.findings = Findings()
        self._given: dict[int, tuple[LiveValue, weakref.ref[torch.UntypedStorage]]] = {}
        self._held: dict[int, weakref.ref[LiveValue]] = {}
        self._blank: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._order = 0
        self._wanted = False  # whether the latest operation is recorded, if it can be
        if program is not None and not self.check:
            self.core = compiled().Core(self, program)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Intercept operations and saved tensors; afterwards only autograd's graph holds the tape."""
        with ExitStack() as stack:
            stack.callback(self.close)
            core = self.core if self.mover is None else None
            pack = core.pack if core is not None else self.pack
            back = compiled().unpack if self.core is not None else unpack
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, back))
            if core is not None:  # it takes them out while nothing is evicted
                core.hooks_found()
                stack.callback(core.hooks_end)
            stack.enter_context(self)
            yield

    def boundary(self) -> None:
        """Begin a region: earlier values are its inputs, and are kept where replays need them."""
        self._given.clear()
        self._held.clear()

    @contextmanager
    def region(self, director: RegionDirector) -> Iterator[None]:
        """A scope inside this recorder's forward: a region with a director of its own.

        Not under a plan, which has decisions for the scope's operations.
        """
        if isinstance(self.director, PlanDirector):
            yield
            return
        before = self.director
        self.boundary()
        self.director = director
        try:
            yield
        finally:
            self.director = before

    def close(self) -> None:
        """Forget all values; those that saved tensors need are held by autograd's graph."""
        self._given.clear()
        self._held.clear()
        self._blank.clear()

    # ---- operations ------------------------------------------------------------------------------

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation, and record it if the director wants that; a backward inside the forward is not
        recorded.
        """
        info = op_info(func)
        if info.is_view or info.waits or private.in_backward():
            return self._call(func, args, kwargs)
        self._wanted = self.director.evicts(func, args, kwargs)
        inputs = [*tensors_of(args), *tensors_of(kwargs)]
        plain = all(has_plain_storage(t) or self.may_keep(t) for t in inputs)
        written = written_tensors(info, args, kwargs) if info.written else []
        prepared = self._prepare(func, info, args, kwargs, inputs, written) if plain else None
        node, writes = prepared if prepared is not None else (None, [])
        before = [(t, copied(t)) for t in written] if self.verify and node is not None else []
        touched = [
            *written,
            *(args[p] for p in hidden_statistics(info, args) if isinstance(args[p], torch.Tensor)),
        ]
        if touched:
            self._copy_on_write(touched)
        if node is not None and info.random and draws(info, args, kwargs):
            result = drawn(node, self._call, args, kwargs, info.fills)
        else:
            result = self._call(func, args, kwargs)
        flat = flat_results(result)
        if info.collective and node is not None:
            flat = [private.wait_for_collective(tensor) for tensor in flat]  # it may be read below
        fresh = _new_storages(flat, inputs)
        if not fresh and not written:
            return result
        stays = self.director.stays(info, len(fresh) + len(written))
        if info.uninitialized:
            for position in fresh:
                self._mark_blank(flat[position])
        self._forget(touched, info)
        if self.mover is not None and isinstance(self.director, PlanDirector) and self.director.moves:
            with unseen():
                self._move(self.mover, self.director, info, fresh, [flat[at] for at in fresh] + written)
        if node is None:
            return result
        if self.verify and not info.collective:
            reason = why_not_reproduced(node, info, args, kwargs, flat, before, self._second_run)
            if reason:
                self._not_reproduced(info.name, reason)
                return result
        self._link(node, fresh, flat, writes, written, stays)
        return result

    def skip(self, count: int) -> None:
        """So many operations of the program have run in the compiled half."""
        self.director.skip(count)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return proceed(func, args, kwargs)

    def _second_run(self, call: Callable[[], Any]) -> Any:
        """Make the call of a second run."""
        return call()

    def _forget(self, touched: list[torch.Tensor], info: OpInfo) -> None:
        """Forget the values of tensors that are being overwritten."""
        for tensor in touched:
            key = private.storage_key(tensor) if has_plain_storage(tensor) else None
            if key is not None and not (key in self._blank and info.fills and not covers_storage(tensor)):
                self._blank.pop(key, None)
            if key is not None:
                self._given.pop(key, None)
                self._held.pop(key, None)

    def _prepare(
        self,
        func: Any,
        info: OpInfo,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> tuple[Node, list[Ref]] | None:
        """The node of a call about to be made, or ``None`` where it cannot be replayed."""
        if (info.reason and not info.collective) or info.uninitialized or not self._wanted:
            return None
        fills = {id(t) for t in written if info.fills and covers_storage(t)}
        statistics = hidden_statistics(info, args)
        ignored = fills | {id(args[p]) for p in statistics if isinstance(args[p], torch.Tensor)}
        for tensor in inputs:
            if is_sparse(tensor):
                continue
            if id(tensor) not in ignored and private.storage_key(tensor) in self._blank:
                return None
        device = inputs[0].device if inputs else torch.device(kwargs.get("device") or "cpu")
        node = Node(func, self._order, device)
        self._order += 1
        node.statistics = statistics
        writes: list[Ref] = []
        overwritten = {id(t) for t in written} - {id(args[p]) for p in statistics}
        try:
            node.args = [self._reference(item, fills, overwritten, writes) for item in args]
            node.kwargs = {
                name: self._reference(item, fills, overwritten, writes) for name, item in kwargs.items()
            }
        except Unrecordable:
            return None
        return node, writes

    def _reference(self, item: Any, fills: set[int], overwritten: set[int], writes: list[Ref]) -> Any:
        """An argument with `Ref` in place of tensors; the overwritten ones also go to ``writes``."""
        if isinstance(item, torch.Tensor):
            if is_sparse(item):
                if id(item) in overwritten:
                    raise Unrecordable
                return SparseInput(item)
            filled = id(item) in fills
            value = LiveValue(None, item.untyped_storage().nbytes()) if filled else self._value_of(item)
            ref = Ref(value, item)
            if id(item) in overwritten and value.held is not None:
                raise Unrecordable
            if id(item) in overwritten:
                writes.append(ref)
            return ref
        if isinstance(item, (tuple, list)):
            return [self._reference(part, fills, overwritten, writes) for part in item]
        return item

    def may_keep(self, tensor: torch.Tensor) -> bool:
        """Whether a replay may keep a tensor that is not strided: a sparse input or buffer."""
        return is_sparse(tensor)

    def _link(
        self,
        node: Node,
        fresh: list[int],
        flat: list[Any],
        writes: list[Ref],
        written: list[torch.Tensor],
        stays: tuple[bool, ...],
    ) -> None:
        made: list[LiveValue] = []
        place = 0
        loose = op_info(node.func).loose
        for position in fresh:
            if not (place < len(stays) and stays[place]):
                made.append(
                    self._register(node, flat[position], 0 if position in loose else reach(flat[position]))
                )
                node.outputs.append((position, weakref.ref(made[-1])))
            place += 1
        matter = {id(ref): ref.value.held is not None or ref.value.node is not None for ref in writes}
        for ref, tensor in zip(writes, written, strict=False):
            if place < len(stays) and stays[place]:
                value = LiveValue(None, ref.value.nbytes)
            else:
                value = self._register(node, tensor, max(ref.value.extent, reach(tensor)))
            made.append(value)
            node.written.append((ref, matter[id(ref)], weakref.ref(value)))
            place += 1
        node.reads(node.inputs())

    def _move(
        self,
        mover: TransferEngine,
        director: PlanDirector,
        info: OpInfo,
        fresh: list[int],
        wrote: list[torch.Tensor],
    ) -> None:
        """Store the values just written that the plan moves, and register their `Fetch`."""
        moves = director.moves_of(wrote)
        if info.collective and any(number >= 0 for number in moves):  # its results are copied below
            wrote = [private.wait_for_collective(tensor) for tensor in wrote]
        loose = [position in info.loose for position in fresh] + [False] * (len(wrote) - len(fresh))
        for number, tensor, is_loose in zip(moves, wrote, loose, strict=True):
            if number < 0 or not has_plain_storage(tensor):
                continue
            fetch = Fetch(mover.out(number, tensor), mover, self._order - 0.5)
            value = self._register(fetch, tensor, 0 if is_loose else reach(tensor))
            if not fetch.exact:
                value.digest = None
            fetch.output = weakref.ref(value)

    def _register(self, node: Writer, tensor: torch.Tensor, extent: int) -> LiveValue:
        """Register the value of ``tensor`` as recomputable by ``node``; its first ``extent`` bytes were
        written.
        """
        storage = tensor.untyped_storage()
        key = private.storage_address(storage)
        value = LiveValue(node, storage.nbytes())
        value.extent = extent
        if self.verify:
            value.digest = digest(tensor, extent)
        given = self._given
        given[key] = (value, weakref.ref(storage, lambda _: given.pop(key, None)))
        return value

    def _mark_blank(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = private.storage_address(storage)
        blank = self._blank
        blank[key] = weakref.ref(storage, lambda _: blank.pop(key, None))

    def _value_of(self, tensor: torch.Tensor) -> LiveValue:
        """The present value of a tensor; one that is not recomputable is held from here on."""
        key = private.storage_key(tensor)
        entry = self._given.get(key)
        if entry is not None:
            value = entry[0]
            if self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
                value = self._written_behind(value, tensor)
            if isinstance(value.node, Fetch) and not value.node.stored.replayable_from:
                raise Unrecordable  # its codec loses too much to replay from
            return value
        reference = self._held.get(key)
        value = reference() if reference is not None else None
        if value is not None and value.held is not None and private.version(value.held) == value.version:
            return value
        value = LiveValue.stored(tensor)
        self._held[key] = weakref.ref(value)
        return value

    def _written_behind(self, value: LiveValue, tensor: torch.Tensor) -> LiveValue:
        """Code that the dispatcher does not see has overwritten ``tensor``: keep its present value.

        Operations that read the old one cannot be replayed, since no copy of it exists.
        """
        name = str(value.node.func) if value.node is not None else "an operation"
        self._not_reproduced(name, "its result was written by code that the dispatcher does not see")
        for reader, _ in self._given.values():
            if isinstance(reader.node, Node) and any(read is value for read in reader.node.inputs()):
                self._not_reproduced(
                    str(reader.node.func),
                    "what it had read was overwritten by code that the dispatcher does not see",
                )
        new = LiveValue.stored(tensor)
        value.node, value.digest = None, None
        value.held, value.version = new.held, (-1 if value.readers else new.version)
        key = private.storage_key(tensor)
        self._given.pop(key, None)
        self._held[key] = weakref.ref(new)
        return new

    def _copy_on_write(self, written: list[torch.Tensor]) -> None:
        """Give recorded readers of a held tensor a copy before it is overwritten."""
        for tensor in written:
            if not has_plain_storage(tensor):
                continue
            reference = self._held.get(private.storage_key(tensor))
            value = reference() if reference is not None else None
            if value is None or value.held is None or private.version(value.held) != value.version:
                continue
            if value.readers > 0:
                value.held = on_a_copy(value.held)
                value.version = private.version(value.held)

    def _not_reproduced(self, name: str, reason: str) -> None:
        self.findings.kept.setdefault(name, reason)

    # ---- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd saves ``tensor``: keep or evict it."""
        if type(tensor) is torch.nn.Parameter:  # the commonest, and no plan evicts it
            packed = Kept(tensor, self.mover)
        elif is_wrapper(tensor):
            return Kept(tensor) if private.transformed() else Wrapped(tensor, self.pack)
        elif not has_plain_storage(tensor):
            return Kept(tensor)
        else:
            packed = self._packed(tensor)
        return Attributed(tensor, packed) if tensor.__dict__ else packed

    def _packed(self, tensor: torch.Tensor) -> Kept | Evicted:
        entry = self._given.get(private.storage_key(tensor))
        if entry is None:
            return Kept(tensor, self.mover)
        if not self.check:
            return self._evict(entry[0], tensor)
        with unseen():  # digests are operations
            return self._evict(entry[0], tensor)

    def _evict(self, value: LiveValue, tensor: torch.Tensor) -> Kept | Evicted:
        if self.verify and value.digest is not None and digest(tensor, value.extent) != value.digest:
            self._written_behind(value, tensor)
            return Kept(tensor)
        checked = value.digest
        exact = value.node is None or value.node.exact
        if not exact:
            checked = None
        elif self.check and checked is None:
            checked = value.digest = digest(tensor, value.extent)
        if not value.evicted:
            value.evicted = True
            self.findings.evicted_bytes += value.nbytes
        return Evicted(
            Ref(value, tensor), tensor, checked if self.check else None, self.around_unpack, self.mover
        )


def _new_storages(results: list[Any], inputs: list[torch.Tensor]) -> list[int]:
    """Positions of results on storages that no input has, one for each storage."""
    known = {private.storage_key(t) for t in inputs if has_plain_storage(t)}
    fresh: list[int] = []
    for position, tensor in enumerate(results):
        if isinstance(tensor, torch.Tensor) and has_plain_storage(tensor):
            key = private.storage_key(tensor)
            if key not in known:
                known.add(key)
                fresh.append(position)
    return fresh


class Unrecordable(Exception):
    """An argument cannot be described by value and geometry."""
