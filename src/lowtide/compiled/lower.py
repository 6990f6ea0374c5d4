"""What two halves of a joint graph do to memory, before any kernel is compiled.

What Inductor generates for a half is text: it is taken down while Inductor compiles the half, or the half is
lowered for that alone. Either way the text is run on fake tensors, its kernels left out.
"""

from __future__ import annotations

import ast
import builtins
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from lowtide.compiled.cut import Halves
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.moving import arriving_bytes
from lowtide.errors import PlanError
from lowtide.ops import op_info
from lowtide.private import (
    DynamicOutputShapeException,
    FakeTensorMode,
    OpOverload,
    TorchDispatchMode,
    inductor,
    partitioning,
    tree_leaves,
)
from lowtide.progress import current
from lowtide.trace.costs.roofline import outside_modes
from lowtide.trace.costs.specs import described_call, runnable
from lowtide.trace.costs.timing import measure_scratch

Size = Callable[[Any], int]
"""A size as a number."""

HalvesBytes = Callable[..., "tuple[HalfBytes, HalfBytes]"]
"""From sizes as numbers to what forward and backward do to memory. A second argument names the storages that
the backward is handed and others hold until it has ended; without it these are the graph\'s inputs.
"""


@dataclass(frozen=True)
class Traffic:
    """What generated kernels are given.

    Attributes:
        bytes: of everything but masks.
        masks_written, masks_read: elements of boolean tensors that a kernel is the first to be given, and
            that it is given later.
    """

    bytes: int = 0
    masks_written: int = 0
    masks_read: int = 0


@dataclass(frozen=True)
class HalfBytes:
    """What a forward or backward does to memory.

    Attributes:
        peak_bytes: the most live bytes at any moment, what it is given included where it lets go of that.
        end_bytes: what it returns, as far as it made or was given it.
        copied: names of inputs that are live anyway, of which it returns copies laid out anew -> their bytes.
        traffic: of its generated kernels.
    """

    peak_bytes: int
    end_bytes: int
    copied: Mapping[str, int] = field(default_factory=dict)
    traffic: Traffic = Traffic()


class CompilationEnded(BaseException):
    """Nothing more is wanted of a compilation. No `Exception`: PyTorch would catch that."""


class Generated:
    """What halves do to memory that Inductor generates code for, by the text of that code.

    Args:
        joint: the graph.
        options: Inductor's settings.
        known_scratch: what each kind of call takes beyond its results; shared by all cuts of a graph.
        halves: forward and backward; they are lowered unless their text was read while they were compiled.
    """

    def __init__(
        self, joint: Joint, options: dict[str, object], known_scratch: dict[str, int], halves: Halves
    ) -> None:
        self._joint, self._options, self._halves = joint, options, halves
        self._scratch = Scratch(known_scratch), Scratch(known_scratch)
        self._texts: dict[bool, tuple[str, fx.GraphModule, inductor.Strides]] = {}  # by whether of backward
        self._forward: dict[Size, HalfBytes] = {}

    @property
    def priced(self) -> bool:
        """Whether the text of both halves was read."""
        return len(self._texts) == 2

    def read(self, text: str, half: fx.GraphModule, strides: inductor.Strides, backward: bool) -> None:
        """Take down the text of a half.

        Args:
            text: what Inductor has generated.
            half: from this graph.
            strides: of inputs that are laid out otherwise than the graph says.
            backward: whether it is the backward.
        """
        self._texts[backward] = text, half, strides

    def compile(
        self, half: fx.GraphModule, inputs: Sequence[Any], then: Callable[[], None], **how: Any
    ) -> Any:
        """What Inductor makes of a half; its text is read meanwhile. When that of both was, ``then`` is
        called, before the kernels are compiled that the second names; what it raises ends the compilation.

        Args:
            half: forward or backward, as AOTAutograd hands it over.
            inputs: its (fake) inputs.
            then: ends the compilation by raising `CompilationEnded`.
            how: as of `inductor.compile_half`.
        """
        as_given, strides = partitioning.twin(half), partitioning.laid_out(half, inputs)

        def take_down(text: str) -> None:
            self.read(text, as_given, strides, bool(how.get("is_backward")))
            if self.priced:
                with outside_modes():
                    then()

        with inductor.reading(take_down):
            return inductor.compile_half(half, inputs, **how)

    def _lower(self) -> None:
        forward, backward = self._halves
        current().say("lowering a plan with Inductor", silent=True)
        text, strides = inductor.generated(forward, False, self._options)
        self.read(text, forward, {}, False)
        donated = inductor.donated_inputs(forward, backward, self._joint.forward_outputs)
        text, _ = inductor.generated(backward, True, self._options, strides, donated)
        self.read(text, backward, strides, True)

    def forward_at(self, size_of: Size) -> HalfBytes:
        """The forward alone, whose text is known."""
        if size_of not in self._forward:
            text, half, strides = self._texts[False]
            lent, device = self._joint.inputs_in(), self._joint.device
            scratch = self._scratch[0].run(device)
            self._forward[size_of] = memory_of_generated(text, half, device, lent, scratch, size_of, strides)
        return self._forward[size_of]

    def __call__(self, size_of: Size, lent: Collection[Key] | None = None, /) -> tuple[HalfBytes, HalfBytes]:
        if not self.priced:
            self._lower()
        one, (text, half, strides) = self.forward_at(size_of), self._texts[True]
        held = self._joint.inputs_in(lent) - one.copied.keys()
        device = self._joint.device
        scratch = self._scratch[1].run(device)
        return one, memory_of_generated(text, half, device, held, scratch, size_of, strides)


# ---- of generated text ----------------------------------------------------------------------------

Ask = Callable[[Any, Any, Any], int]
"""Scratch of one call: the operation, its arguments and its keyword arguments, as fake tensors."""


class Scratch:
    """Scratch of the calls of one generated text, in their order.

    Args:
        known: what each kind of call took, by its description; shared with other texts.
    """

    def __init__(self, known: dict[str, int]) -> None:
        self._known = known
        self._first: list[tuple[int, int]] = []  # bytes given, bytes taken

    def run(self, device: torch.device) -> Ask:
        """The scratch that each call takes of a device, for one run of the text.

        The first run measures each kind of call once, on made-up inputs. In a run with other sizes a call's
        scratch grows with the bytes that it is given.
        """
        before, first = iter(self._first), not self._first

        def ask(operation: Any, args: Any, kwargs: Any) -> int:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            here = any(one.device.type == device.type for one in tensors)
            if not here or not runnable(operation) or op_info(operation).is_view:
                return 0
            given = sum(one.nbytes for one in tensors)
            if not first:
                then, took = next(before)
                return -(-took * given // then) if then else took
            spec = described_call(operation, args, kwargs, partitioning.hint)
            if (key := repr(spec)) not in self._known:
                self._known[key] = measure_scratch(spec)
            self._first.append((given, self._known[key]))
            return self._known[key]

        return ask


class _KernelStub:
    """Stands in for a kernel: takes no memory, and counts the tensors that it is given."""

    def __init__(self, ledger: _Ledger) -> None:
        self._ledger = ledger

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        for one in args:
            if isinstance(one, torch.Tensor):
                self._ledger.pass_to_kernel(one)

    def __getattr__(self, name: str) -> _KernelStub:
        return self


class _Extern:
    """Calls of operations that write to what they are given, or allocate their result."""

    def __init__(self, ledger: _Ledger) -> None:
        self._ledger = ledger

    def __getattr__(self, name: str) -> Callable[..., Any]:
        operation = getattr(torch.ops.aten, name, None)

        def call(*args: Any, **kwargs: Any) -> Any:
            if operation is None or "out" not in kwargs:
                return kwargs["out"] if operation is None else operation(*args, **kwargs)
            out = kwargs.pop("out")
            self._ledger.take_scratch(operation.default, args, kwargs)
            return out

        return call


class _Ledger(TorchDispatchMode):
    """Counts the storages that tensors hold on a kind of device."""

    supports_higher_order_operators = True

    def __init__(self, scratch: Ask, device: str) -> None:
        super().__init__()
        self.scratch, self.device = scratch, device
        self.resident: set[int] = set()
        self.lending = False  # what is made now is live anyway
        self.lent: list[torch.Tensor] = []  # held: addresses of storages are used again
        self.holders: dict[int, int] = {}
        self.live = self.peak = 0
        self.moved = self.masks_written = self.masks_read = 0
        self.filled: set[int] = set()  # masks that hold something

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if "out" in kwargs:
            return kwargs["out"]
        result = func(*args, **kwargs)
        inner = next((at for at, item in enumerate(args) if isinstance(item, OpOverload)), None)
        if inner is not None:  # run with a generator's state, by a higher-order operator
            func, args = args[inner], args[inner + 1 :]
        self.live += arriving_bytes(func, args)
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.hold(leaf)
        self.take_scratch(func, args, kwargs)
        return result

    def take_scratch(self, func: Any, args: Any, kwargs: Any) -> None:
        """Count what a call takes beyond its results while it runs."""
        self.peak = max(self.peak, self.live + self.scratch(func, args, kwargs))

    def hold(self, tensor: torch.Tensor) -> None:
        """Count what a tensor lies in until nothing holds it."""
        key = partitioning.storage_of(tensor)
        if self.lending and key is not None:
            self.resident.add(key)
        if key is None or key in self.resident or tensor.device.type != self.device:
            return
        bytes_ = tensor.untyped_storage().nbytes()
        if not self.holders.get(key):
            self.live += bytes_
            self.peak = max(self.peak, self.live)
        self.holders[key] = self.holders.get(key, 0) + 1
        weakref.finalize(tensor, self._let_go, key, bytes_)

    def fill(self, tensor: torch.Tensor) -> None:
        """A tensor that holds something from the beginning."""
        key = partitioning.storage_of(tensor)
        if key is not None:
            self.filled.add(key)

    def pass_to_kernel(self, tensor: torch.Tensor) -> None:
        """Count what a kernel reads or writes."""
        key = partitioning.storage_of(tensor)
        if tensor.dtype != torch.bool or key is None:
            self.moved += tensor.nbytes
        elif key in self.filled:
            self.masks_read += tensor.numel()
        else:
            self.filled.add(key)
            self.masks_written += tensor.numel()

    def _let_go(self, key: int, bytes_: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            self.live -= bytes_
            self.filled.discard(key)  # addresses are used again


def memory_of_generated(
    text: str,
    module: fx.GraphModule,
    device: torch.device,
    lent: Collection[str],
    scratch: Ask,
    size_of: Callable[[Any], int],
    strides: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> HalfBytes:
    """Live bytes of a half, by the text that Inductor generates for it.

    Args:
        text: what `lowtide.private.inductor.generated` says.
        module: the graph that it was generated from.
        device: whose memory counts.
        lent: names of inputs that are live anyway.
        scratch: bytes that a call of an ATen operation takes beyond its results.
        size_of: a size as a number, where the graph leaves it open.
        strides: of inputs that are laid out otherwise than the graph says.
    """
    nodes = list(module.graph.nodes)
    ledger = _Ledger(scratch, device.type)
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        call = _entry(text, ledger)
        given: list[Any] = []
        seen: dict[int, torch.Tensor] = {}
        for node in nodes:
            if node.op != "placeholder":
                continue
            value = node.meta["val"]
            if isinstance(value, torch.Tensor):
                value = _alike(value, seen, ledger, node.name in lent, size_of, strides.get(node.name))
            elif isinstance(value, torch.SymInt):
                value = size_of(value)
            given.append(value)
            del value
        seen.clear()
        ledger.peak = ledger.live
        try:
            kept = call(given)
        except DynamicOutputShapeException as error:
            raise PlanError(_HELD_BY_NONE.format(_SIZED_BY_VALUES.format(error.func))) from None
        end = ledger.live
        returned = [getattr(node, "name", "") for node in nodes[-1].args[0]]  # no name: no result of a call
        copied = _copies_of(returned, kept, lent, ledger)
        del kept
    traffic = Traffic(ledger.moved, ledger.masks_written, ledger.masks_read)
    return HalfBytes(ledger.peak, end, copied, traffic)


def _copies_of(names: list[str], kept: Any, lent: Collection[str], ledger: _Ledger) -> dict[str, int]:
    """What is returned under the name of an input and is not that input."""
    return {
        name: tensor.untyped_storage().nbytes()
        for name, tensor in zip(names, kept, strict=True)
        if name in lent
        and isinstance(tensor, torch.Tensor)
        and partitioning.storage_of(tensor) not in ledger.resident
    }


def _alike(
    value: torch.Tensor,
    seen: dict[int, torch.Tensor],
    ledger: _Ledger,
    resident: bool,
    size_of: Callable[[Any], int],
    other: tuple[int, ...] | None,
) -> torch.Tensor:
    """A fake tensor with the geometry of another; tensors that share a storage go on sharing one."""
    address = partitioning.storage_of(value)
    shape, stride = [*map(size_of, value.shape)], [*(other or map(size_of, value.stride()))]
    if address is None:
        return torch.empty(shape, dtype=value.dtype, device=value.device)
    if address not in seen:
        count = -(-size_of(value.untyped_storage().nbytes()) // value.dtype.itemsize)
        if other is not None and all(shape):
            count = max(count, 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)))
        ledger.lending = resident
        seen[address] = torch.empty(count, dtype=value.dtype, device=value.device)
        ledger.lending = False
        if resident:
            ledger.lent.append(seen[address])
        ledger.fill(seen[address])
    base = seen[address]
    if base.dtype != value.dtype:
        base = base.view(value.dtype)
    return torch.as_strided(base, shape, stride, size_of(value.storage_offset()))


def _entry(text: str, ledger: _Ledger) -> Callable[[list[Any]], Any]:
    """The function ``call(args)`` of generated text; kernels and checks do nothing."""
    functions: list[ast.stmt] = [
        node
        for node in ast.parse(text).body
        if (isinstance(node, ast.FunctionDef) and node.name not in ("get_args", "benchmark_compiled_module"))
        or (isinstance(node, ast.ClassDef) and node.name == "Runner")
    ]
    names: dict[str, Any] = {
        "torch": torch,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "device": torch.device,
        "extern_kernels": _Extern(ledger),
        "reinterpret_tensor": _reinterpret,
        "copy_if_misaligned": _aligned,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu_pinned": _empty_on("cpu"),
        **{f"empty_strided_{kind}": _empty_on(kind) for kind in ("cpu", "cuda", "xpu", "mtia")},
    }
    source = ast.Module(functions, [])
    known = names.keys() | {one.name for one in functions}  # type: ignore[attr-defined]
    _refuse_unknown_memory(source, known)
    for node in ast.walk(source):
        if isinstance(node, ast.Name) and node.id not in names and not hasattr(builtins, node.id):
            names[node.id] = _KernelStub(ledger)
    exec(compile(ast.fix_missing_locations(source), "<generated>", "exec"), names)
    runner = names.get("Runner")
    if isinstance(runner, type):
        return runner(partitions=[]).call
    return names["call"]


_HELD_BY_NONE = "no budget can be held for this compiled step: {}, or limit the model without compiling it"
_SIZED_BY_VALUES = (
    "the size of the result of {} depends on values: leave out "
    "torch._dynamo.config.capture_dynamic_output_shape_ops"
)

_UNKNOWN_MEMORY = {
    "get_external_object_by_index": "the graph runs on streams of the model's own (torch.cuda.stream), which "
    "hold memory for as long as they lag behind: leave them out",
    "empty_strided_p2p": "Inductor allocates the buffers of collectives outside PyTorch's allocator: "
    "leave out torch._inductor.config._micro_pipeline_tp",
}
"""What makes a tensor in generated text -> why nobody predicts how much that takes, and what to do."""


def _refuse_unknown_memory(source: ast.Module, known: Collection[str]) -> None:
    """Generated kernels return nothing: what is assigned comes from a function that is known here.

    Raises:
        PlanError: one is not.
    """
    for node in ast.walk(source):
        called = (
            node.value.func if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) else None
        )
        name = called.id if isinstance(called, ast.Name) else ""
        if name and name != "get_raw_stream" and name not in known and not hasattr(builtins, name):
            why = _UNKNOWN_MEMORY.get(name, f"Inductor takes memory by {name!r}, which lowtide does not know")
            raise PlanError(_HELD_BY_NONE.format(why))


def _empty_on(kind: str) -> Callable[..., torch.Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=kind)

    return empty


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """What a kernel is given that takes its arguments for aligned to 16 bytes, as a card's memory is."""
    return tensor.clone() if tensor.storage_offset() * tensor.itemsize % 16 else tensor


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)
