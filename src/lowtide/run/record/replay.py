"""Bring back an evicted value: replay recorded operations, starting from values that are there. Where a step
is verified, run each operation a second time at once, and compare.

Random operations draw the same numbers again, even while other threads draw. All threads of a process share
PyTorch's default generator. A thread that reads its state, draws, and later sets that state to draw again
would disturb others that draw in between (one that loads data, say), and be disturbed by them. So on the CPU
an operation that may run again draws from a generator of its own thread, which begins at the shared
generator's state; then the shared one is set to where the own one ends, so that the numbers are those of the
plain step. If another thread has drawn meanwhile, the shared one stays as it is, and an operation that only
fills a tensor draws again, with a seed drawn from the shared one. A replay uses the own generator alone.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress, tee
from operator import eq, methodcaller
from typing import Any, Literal

import torch

from lowtide import private
from lowtide.errors import PlanError, ReplayError
from lowtide.interception import cpp_module, unseen
from lowtide.ops import Call, has_plain_storage, op_info
from lowtide.run.record.values import Fetch, LiveValue, Node, Ref, SparseInput, Writer
from lowtide.run.tensor_bytes import same_bytes, words_of
from lowtide.trace.untouched import generator_state, set_generator_state


def flat_results(result: Any) -> list[Any]:
    """The results of an operation as a flat list."""
    if isinstance(result, (tuple, list)):
        return [part for item in result for part in (item if isinstance(item, (tuple, list)) else (item,))]
    return [result]


def bring_back(value: LiveValue, on_demand: Any = None) -> torch.Tensor:
    """A tensor on the bytes of ``value``, after the replays that it takes.

    Operations run in forward order, each once. An output with readers left is cached with its value, and
    dropped after the last of them. Without readers left (a second backward over a retained graph) nothing is
    cached beyond this call.

    Raises:
        ReplayError: the replay starts from a tensor that was overwritten or freed.
    """
    cpp = cpp_module()
    base = None if cpp is None else cpp.replay(value, on_demand)
    return bring_back_in_python(value, on_demand) if base is None else base


def bring_back_in_python(value: LiveValue, on_demand: Any = None) -> torch.Tensor:
    """As `bring_back`, where there is no C++, a value was moved, or an error has to be raised."""
    base = value.here()
    if base is None:
        base = Replay(value, on_demand).run()
        if on_demand is not None:
            on_demand.relieve()  # for what backward does with it
    return base


class Replay:
    """One replay of the operations that bring a value back.

    Attributes:
        order: the nodes that run.
        made: a tensor on each value that these nodes write, and on each cached value that they read: its last
            reader may drop the cached copy before it is needed here.
        uses: how often each value is still to be used; then it is no longer in ``made``.
    """

    def __init__(self, value: LiveValue, on_demand: Any = None) -> None:
        self.value, self.on_demand = value, on_demand
        self.order: list[Writer] = []
        self.made: dict[int, torch.Tensor] = {}
        stack, seen = [value], set[int]()
        while stack:
            wanted = stack.pop()
            node = wanted.node
            if node is None or id(node) in seen:
                continue
            if wanted.here() is None:
                seen.add(id(node))
                self.order.append(node)
                stack.extend(node.inputs)
            elif wanted.cached is not None:
                self.made[id(wanted)] = wanted.cached
        self.order.sort(key=lambda node: node.order)
        self.uses = Counter(id(source) for node in self.order for source in node.inputs)
        self.uses[id(value)] += 1

    def run(self) -> torch.Tensor:
        """A tensor on the value."""
        with unseen(), private.replaying():
            for node in self.order:
                private.set_grad_enabled(node.grad)
                if self.on_demand is not None:
                    self.on_demand.relieve()
                if isinstance(node, Fetch):
                    self._place(node.output, node.fetch())
                else:
                    self._run(node)
        found = self.made.get(id(self.value))
        if found is None:
            raise ReplayError(
                f"replaying {self.order[-1].func} did not produce the value asked for: please report this"
            )
        return found

    def _run(self, node: Node) -> None:
        """Run one recorded operation again, and cache its outputs for their readers."""
        bases = [self._base(node, value) for value in node.inputs]
        alone = [self._is_alone(node, value) for value in node.inputs]
        for reference, tensor in run_node(node, bases, alone):
            self._place(reference, tensor)
        del bases
        node.drop_inputs()
        for source in node.inputs:
            self.uses[id(source)] -= 1
            if self.uses[id(source)] <= 0:
                self.made.pop(id(source), None)

    def _is_alone(self, node: Node, value: LiveValue) -> bool:
        """Whether nobody but the node waits for the bytes of a value that it overwrites. A node counts as a
        reader of its inputs until it has run again; in a second run each reader that is left is another one.
        """
        waits = node.waits if node.call is None else cpp_module().waits(node.call)
        return value.held is None and value.readers <= int(waits) and self.uses[id(value)] <= 1

    def _base(self, node: Node, value: LiveValue) -> torch.Tensor:
        """A tensor on a value that the replay reads."""
        base = self.made.get(id(value))
        if base is None:
            base = value.here()
        if base is None:
            raise ReplayError(f"{node.func} lacks an input in its replay: please report this")
        return base

    def _place(self, reference: weakref.ref[LiveValue] | None, tensor: torch.Tensor) -> None:
        """Keep a tensor that was written while its value has readers."""
        value = reference() if reference is not None else None
        if value is None:
            return
        if value.readers > 0 and value.cached is None:
            value.keep_cached(tensor)
            if self.on_demand is not None:
                self.on_demand.note_cached(value)
        if self.uses[id(value)] > 0:
            self.made[id(value)] = tensor


def run_node(
    node: Node, bases: list[torch.Tensor], alone: list[bool]
) -> Sequence[tuple[weakref.ref[LiveValue] | None, torch.Tensor]]:
    """Run a recorded operation again; C++ calls it, too (`cpp/replay.h`).

    Args:
        node: the operation.
        bases: a tensor on each value that it reads.
        alone: of a value that it overwrites, whether nobody else waits for it, so that its bytes may change.

    Returns:
        A weak reference to each value that it wrote, with a tensor on it.
    """
    if node.call is not None:
        for place, _ in node.updated:
            bases[place] = _own_copy(bases[place], alone[place])
        flat = cpp_module().again(node.call, bases)
        wrote = [(new, bases[place]) for place, new in node.updated]
        return [(value, flat[position]) for position, value in node.outputs] + wrote
    read = {id(value): (base, free) for value, base, free in zip(node.inputs, bases, alone, strict=True)}
    overwritten: dict[int, torch.Tensor] = {}
    for one in node.written:  # the old value itself where nobody else reads it, else a copy
        ref, old = one.ref, one.ref.value
        if one.reads:
            base = _own_copy(*read[id(old)])
        else:
            base = torch.empty(old.nbytes, dtype=torch.uint8, device=node.device)
        overwritten[id(ref)] = ref.over(base.untyped_storage())
    args = [_argument(item, read, overwritten) for item in node.args]
    kwargs = {name: _argument(item, read, overwritten) for name, item in node.kwargs.items()}
    for position in node.statistics:
        args[position] = args[position].clone()
    flat = flat_results(run_again(node, args, kwargs))
    wrote = [(one.new, overwritten[id(one.ref)]) for one in node.written]
    return [(value, flat[position]) for position, value in node.outputs] + wrote


def _argument(
    item: Any, read: dict[int, tuple[torch.Tensor, bool]], overwritten: dict[int, torch.Tensor]
) -> Any:
    """A recorded argument with tensors in place of references: on what is read, by value, or overwritten, by
    reference.
    """
    if isinstance(item, Ref):
        found = overwritten.get(id(item))
        return item.view(read[id(item.value)][0] if found is None else found)
    if isinstance(item, SparseInput):
        return item.here()
    return [_argument(part, read, overwritten) for part in item] if isinstance(item, list) else item


def _own_copy(base: torch.Tensor, alone: bool) -> torch.Tensor:
    """What an operation may overwrite in place of a value's bytes: these, or a copy."""
    return base if alone else words_of(base, torch.uint8, base.untyped_storage().nbytes()).clone()


def run_again(node: Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operation with its recorded random state, and restore the generator; wait for a collective."""
    if node.random_state is None:
        result = node.func(*args, **kwargs)
        return private.wait_for_collective(result) if op_info(node.func).collective else result
    return _draw_again(node, tuple(args), kwargs)


Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class _Own(threading.local):
    def __init__(self) -> None:
        self.generator = torch.Generator()


_OWN = _Own()


@functools.cache
def with_generator(func: Any) -> tuple[Any, int]:
    """The overload of a random operation that also takes a generator, or ``None``, and the generator's
    position.
    """
    if not isinstance(func, private.OpOverload):
        return None, 0
    wanted = [(a.name, str(a.type)) for a in private.schema_of(func).arguments if a.name != "generator"]
    for other in private.similar_overloads(func):
        arguments = private.schema_of(other).arguments
        places = [place for place, a in enumerate(arguments) if a.name == "generator"]
        if places and [(a.name, str(a.type)) for a in arguments if a.name != "generator"] == wanted:
            return other, places[0]
    return None, 0


def _with(
    generator: torch.Generator, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if position < len(args):
        return (*args[:position], generator, *args[position + 1 :]), kwargs
    return args, {**kwargs, "generator": generator}


_STATE, _NUMPY, _BYTES = methodcaller("get_state"), methodcaller("numpy"), methodcaller("tobytes")


def _advance(generator: torch.Generator, before: bytes, after: torch.Tensor) -> bool:
    """Set a generator's state to ``after`` if it is ``before``; return whether it was.

    All of it runs inside built-in iterators, between which Python does not switch threads: a thread that drew
    in between would have its numbers drawn a second time. The compared state is kept until the end, since
    freeing a tensor may switch threads, too.
    """
    states, _held = tee(map(_STATE, (generator,)))
    arrays, _held_too = tee(map(_NUMPY, states))
    now = map(_BYTES, arrays)
    return bool(list(map(generator.set_state, compress((after,), map(eq, now, (before,))))))


def run_first(node: Node | None, run: Runner, call: Call) -> Any:
    """Run an operation in the forward, and note in its node what `run_again` needs beside the arguments.

    Args:
        node: the operation as it is recorded; ``None`` where it is not.
        run: runs an operation.
        call: the call.
    """
    if node is not None and call.draws():
        return _draw(node, run, call)
    return run(call.func, call.args, call.kwargs)


def _draw(node: Node, run: Runner, call: Call) -> Any:
    """Run a random operation in the forward, and record the state that it draws from.

    Args:
        node: the operation as it is recorded.
        run: runs an operation.
        call: the call; one that only fills a tensor may run a second time.
    """
    args, kwargs = call.args, call.kwargs
    given = [item for item in (*args, *kwargs.values()) if isinstance(item, torch.Generator)]
    node.generator = given[0] if given else None
    node.random_state = generator_state(node.device, node.generator)
    func, position = with_generator(node.func)
    if func is None or node.device.type != "cpu":
        return run(node.func, args, kwargs)
    own, shared = _OWN.generator, node.generator or torch.default_generator
    set_generator_state(node.device, own, node.random_state)
    args, kwargs = _with(own, position, args, kwargs)
    result = run(func, args, kwargs)
    if not _advance(shared, node.random_state, own.get_state()) and call.info.fills:
        own.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=shared)))
        node.random_state = generator_state(node.device, own)
        result = run(func, args, kwargs)
    return result


def _draw_again(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random operation again from its recorded state; the shared generator is left unchanged."""
    assert node.random_state is not None
    func, position = with_generator(node.func)
    if func is not None and node.device.type == "cpu":
        set_generator_state(node.device, _OWN.generator, node.random_state)
        args, kwargs = _with(_OWN.generator, position, args, kwargs)
        return func(*args, **kwargs)
    before = generator_state(node.device, node.generator)
    set_generator_state(node.device, node.generator, node.random_state)
    try:
        return node.func(*args, **kwargs)
    finally:
        set_generator_state(node.device, node.generator, before)


Verify = Literal["first", "always", "never"]


def check_verify(verify: str) -> None:
    """Raise a `PlanError` where this is no `Verify`."""
    if verify not in ("first", "always", "never"):
        raise PlanError(f"verify={verify!r} is not known: use 'first', 'always' or 'never'")


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the same layout: a kernel may round differently in another one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def why_not_reproduced(
    node: Node,
    call: Call,
    flat: list[Any],
    before: list[tuple[torch.Tensor, torch.Tensor]],
    around: Callable[[Callable[[], Any]], Any],
) -> str:
    """Why a second run of an operation differs from the first, or an empty text.

    Args:
        node: the recorded operation.
        call: the first run.
        flat: its results.
        before: each tensor that it overwrote, with a copy from before.
        around: makes the call of the second run, to measure it.
    """
    args, kwargs = list(call.args), call.kwargs
    try:
        if before:
            copies = {id(tensor): copy for tensor, copy in before}
            args, kwargs = private.tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
        with private.replaying():
            again = flat_results(around(lambda: run_again(node, args, kwargs)))
    except RuntimeError as error:
        return f"its second run raised {type(error).__name__}: {error}"
    results = [pair for at, pair in enumerate(zip(flat, again, strict=True)) if at not in call.loose]
    pairs = [(a, b) for a, b in results if isinstance(a, torch.Tensor)] + before
    for first, second in pairs:
        if has_plain_storage(first) and not same_bytes(first, second):
            return "a second run with equal inputs gave other bytes"
    return ""
