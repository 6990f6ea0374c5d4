"""One operation of PyTorch's operator database, forward and backward, with everything evicted that can be.

Each sample's inputs are fed as *non-leaf* tensors, so that they, too, can be recomputed. A sample runs plain
twice (does it agree with itself?) and once under a `Recorder` that gives everything up and verifies; outputs
and gradients are compared bit by bit. What was dropped is not what lowtide says it gave up but what is gone:
after the forward the caller lets go of inputs and outputs, and the storages that autograd had saved are
looked for. Workspaces and tables parts of which no kernel writes or reads (`loose` in `lowtide.ops`: the
alignment table of CTC loss) are recomputed without being compared; the gradients that come of them are.
"""

from __future__ import annotations

import signal
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from lowtide.meter import storages
from lowtide.run.record.directors import ScopeDirector
from lowtide.run.record.recorder import Recorder
from lowtide.run.record.tape import Tape
from lowtide.run.tensor_bytes import same_bytes

Status = Literal["bitwise", "different", "error", "plain raises", "plain differs", "no gradient", "too slow"]
Variant = Literal["float", "complex", "inplace", "strided", "conjugate", "negative"]
VARIANTS: tuple[Variant, ...] = ("float", "complex", "inplace", "strided", "conjugate", "negative")
ABOUT: dict[Variant, str] = {
    "float": "float32 samples (or the type that the operation has), every sample",
    "complex": "complex64 samples of operations that differentiate them",
    "inplace": "the in-place variant, on a non-leaf tensor",
    "strided": "every differentiable input a non-contiguous view of a larger tensor",
    "conjugate": "complex64 inputs with the conjugate bit set",
    "negative": "inputs with the negative bit set",
}
SECONDS_PER_SAMPLE = 60
PLAIN_RUNS = 200
FROM_PYTHON = ("aten.lift_fresh.default",)  # constants that no operation writes


@dataclass
class Outcome:
    """What one sample, or all samples of one operation, showed.

    Attributes:
        name: the operation's name in the database, with its variant of test where it has one.
        variant: how the inputs were fed.
        counts: samples by status.
        droppable_bytes: bytes of the distinct storages that autograd saved and that an operation of the step
            wrote.
        dropped_bytes: those of them that were gone before backward.
        kept: operations that did not reproduce, with the reason.
        still: why storages stayed, with their bytes.
        notes: messages of failures, a few.
    """

    name: str
    variant: Variant
    counts: Counter[Status] = field(default_factory=Counter)
    droppable_bytes: int = 0
    dropped_bytes: int = 0
    kept: dict[str, str] = field(default_factory=dict)
    still: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    @property
    def samples(self) -> int:
        return sum(self.counts.values())

    @property
    def wrong(self) -> int:
        """Samples with other bits than plain, or an error that plain does not raise."""
        return self.counts["different"] + self.counts["error"]

    def add(self, other: Outcome) -> None:
        self.counts.update(other.counts)
        self.droppable_bytes += other.droppable_bytes
        self.dropped_bytes += other.dropped_bytes
        self.kept.update(other.kept)
        self.still.update(other.still)
        self.notes = [*self.notes, *(note for note in other.notes if note not in self.notes)][:3]


class Watching(Recorder):
    """A recorder that remembers, weakly, which storages autograd was given to save, and which operation wrote
    each.
    """

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        super().__init__(ScopeDirector(), tape=Tape(verify=True))
        self.leaf_keys = {s._cdata for s in storages(leaves)}
        self.saved: list[tuple[weakref.ref[torch.UntypedStorage], int, str]] = []
        self.seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.writers: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().operation(func, args, kwargs)
        for storage in storages(t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)):
            known = self.writers.get(storage._cdata)
            if known is None or known[0]() is None:
                self.writers[storage._cdata] = (weakref.ref(storage), str(func))
        return result

    def pack(self, tensor: torch.Tensor) -> Any:
        for storage in storages([tensor]):
            writer = self.writers.get(storage._cdata)
            name = writer[1] if writer is not None and writer[0]() is not None else "unseen"
            if name in FROM_PYTHON:
                continue
            known = self.seen.get(storage._cdata)
            if storage._cdata in self.leaf_keys or (known is not None and known() is not None):
                continue
            self.seen[storage._cdata] = reference = weakref.ref(storage)
            self.saved.append((reference, storage.nbytes(), name))
        return super().pack(tensor)


@dataclass
class Ran:
    outputs: list[torch.Tensor]
    gradients: list[torch.Tensor | None]
    recorder: Watching | None
    gone: list[tuple[int, bool, str]]


class NoGradient(Exception):
    """No output depends on an input."""


def _leaf(tensor: torch.Tensor, variant: Variant) -> torch.Tensor:
    """What a non-leaf input is made of."""
    value = tensor.detach().clone()
    if tensor.requires_grad and tensor.layout is torch.strided:
        if variant == "strided":
            value = torch.stack([value, torch.zeros_like(value)], dim=-1)
        elif variant == "conjugate" and value.is_complex():
            value = value.conj().resolve_conj()
        elif variant == "negative":
            value = -value
    return value.requires_grad_(tensor.requires_grad)


def _enter(leaf: torch.Tensor, variant: Variant) -> torch.Tensor:
    """A non-leaf input with the sample's values."""
    if leaf.layout is not torch.strided or not leaf.requires_grad:
        return leaf.clone()
    value = leaf * 1
    if variant == "strided":
        return value.select(-1, 0)
    if variant == "conjugate" and value.is_complex():
        return value.conj()
    if variant == "negative":
        return torch._neg_view(value)  # pyright: ignore
    return value


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._is_zerotensor():  # zeros without memory
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _cotangent(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return torch.randn(tensor.shape, generator=generator, dtype=kind).to(tensor.dtype)


def run_sample(
    call: Callable[..., Any], sample: Any, variant: Variant, *, record: bool, seed: int = 0
) -> Ran:
    """One forward and backward of one sample."""
    # `torch.manual_seed` writes down a stack trace for each device that is not there
    torch.default_generator.manual_seed(seed)
    whole = (sample.input, sample.args, sample.kwargs)
    flat, structure = pytree.tree_flatten(whole)
    leaves = [_leaf(item, variant) if isinstance(item, torch.Tensor) else item for item in flat]
    differentiable = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    recorder = Watching([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]) if record else None

    def forward() -> list[torch.Tensor]:
        fed = [_enter(item, variant) if isinstance(item, torch.Tensor) else item for item in leaves]
        first, args, kwargs = pytree.tree_unflatten(fed, structure)
        found = [t for t in pytree.tree_leaves(call(first, *args, **kwargs)) if isinstance(t, torch.Tensor)]
        return [_dense(t) for t in found]

    if recorder is not None:
        with recorder.recording():
            outputs = forward()
    else:
        outputs = forward()
    with torch.no_grad():
        copies = [t.detach().clone() for t in outputs]
    wanted = [t for t in outputs if t.requires_grad]
    if not wanted or not differentiable:
        raise NoGradient
    cotangents = [_cotangent(t, seed + place) for place, t in enumerate(wanted)]
    edges = [torch.autograd.graph.get_gradient_edge(t) for t in wanted]
    del outputs, wanted
    gone: list[tuple[int, bool, str]] = []
    if recorder is not None:
        gone = [(nbytes, reference() is None, writer) for reference, nbytes, writer in recorder.saved]
    gradients = torch.autograd.grad(edges, differentiable, cotangents, allow_unused=True)  # type: ignore
    return Ran(copies, [g if g is None else _dense(g) for g in gradients], recorder, gone)


def equal(one: Ran, other: Ran) -> str:
    """Where two runs differ, or nothing."""
    for what, left, right in (
        ("output", one.outputs, other.outputs),
        ("gradient", one.gradients, other.gradients),
    ):
        if len(left) != len(right):
            return f"{what}s: {len(left)} and {len(right)}"
        for place, (a, b) in enumerate(zip(left, right, strict=True)):
            if (a is None) != (b is None):
                return f"{what} {place} is there in one run only"
            if a is not None and b is not None and not same_bytes(a.contiguous(), b.contiguous()):
                far = float((a - b).abs().max()) if a.is_floating_point() or a.is_complex() else -1
                return f"{what} {place} differs (largest difference {far:.3g}, shape {tuple(a.shape)})"
    return ""


@contextmanager
def _within(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _unsteady(call: Callable[..., Any], sample: Any, variant: Variant, plain: Ran) -> str:
    """Where plain differs from itself in one of many runs, before lowtide is blamed: some LAPACK results
    depend on where buffers lie.
    """
    litter = []
    for count in range(1, PLAIN_RUNS):
        litter.append(torch.empty(count * 7 % 50))
        found = equal(plain, run_sample(call, sample, variant, record=False))
        if found:
            return found
    return ""


def check_sample(name: str, call: Callable[..., Any], sample: Any, variant: Variant) -> Outcome:
    """Run one sample plain, plain again, and with everything evicted."""
    outcome = Outcome(name, variant)

    def ended(status: Status, note: str = "") -> Outcome:
        outcome.counts[status] += 1
        if note:
            outcome.notes.append(note[:300])
        return outcome

    try:
        with _within(SECONDS_PER_SAMPLE):
            try:
                plain = run_sample(call, sample, variant, record=False)
                again = run_sample(call, sample, variant, record=False)
            except NoGradient:
                return ended("no gradient")
            except (
                RuntimeError,
                ValueError,
                TypeError,
                NotImplementedError,
                IndexError,
                AssertionError,
            ) as error:
                return ended(
                    "plain raises",
                    f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                )
            unsteady = equal(plain, again)
            if unsteady:
                return ended("plain differs", unsteady)
            try:
                planned = run_sample(call, sample, variant, record=True)
            except TimeoutError:
                raise
            except Exception as error:
                unsteady = _unsteady(call, sample, variant, plain)
                if unsteady:
                    return ended("plain differs", unsteady)
                return ended(
                    "error", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            wrong = equal(plain, planned)
            unsteady = _unsteady(call, sample, variant, plain) if wrong else ""
    except TimeoutError:
        return ended("too slow")
    if unsteady:
        return ended("plain differs", unsteady)
    assert planned.recorder is not None
    outcome.kept.update(planned.recorder.tape.findings)
    for nbytes, is_gone, writer in planned.gone:
        outcome.droppable_bytes += nbytes
        if is_gone:
            outcome.dropped_bytes += nbytes
        else:
            outcome.still[writer] += nbytes
    return ended("different" if wrong else "bitwise", wrong)


def _dtype(op: Any, variant: Variant) -> torch.dtype | None:
    with suppress(Exception):
        supported = op.supported_backward_dtypes("cpu") & op.supported_dtypes("cpu")
        if variant in ("complex", "conjugate"):
            return torch.complex64 if torch.complex64 in supported else None
        for kind in (
            torch.float32,
            torch.float64,
            torch.complex64,
            torch.complex128,
            torch.bfloat16,
            torch.float16,
        ):
            if kind in supported:
                return kind
    return None


def operations(only: str = "") -> list[Any]:
    """The differentiable operations of the database."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if op.supports_autograd and only in full_name(op)]


def full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


def check_operation(op: Any, variant: Variant, limit: int | None = None) -> Outcome | None:
    """All samples of one operation, or the first ``limit``; ``None`` where the variant does not exist."""
    dtype = _dtype(op, variant)
    if dtype is None:
        return None
    call: Callable[..., Any] | None = op.inplace_variant if variant == "inplace" else op
    if call is None or (variant == "inplace" and not op.supports_inplace_autograd):
        return None
    outcome = Outcome(full_name(op), variant)
    torch.manual_seed(0)
    try:
        samples = list(islice(op.sample_inputs("cpu", dtype, requires_grad=True), limit))
    except Exception as error:
        outcome.notes.append(f"no samples: {type(error).__name__}: {error}"[:300])
        return outcome
    for sample in samples:
        if variant == "inplace" and sample.broadcasts_input:
            continue
        outcome.add(check_sample(full_name(op), call, sample, variant))
    return outcome
