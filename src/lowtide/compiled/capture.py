"""A graph that Dynamo has captured, and what compiles it: AOTAutograd by itself, or Inductor.

AOTAutograd traces forward and backward as one joint graph and asks a `Cutter` where to cut it. A graph that
is a whole step is only traced at first, and is planned for at once. A `PartGraph` waits for its step to be
recorded. Both are compiled as often as a plan has cuts for them.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx

from lowtide.compiled.cut import Halves, cut
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.lower import CompilationEnded
from lowtide.compiled.moving import Way
from lowtide.compiled.price import CandidateCuts
from lowtide.compiled.shelf import cache_key, open_shelf, own_facts
from lowtide.compiled.timeline import Recording
from lowtide.errors import PlanError
from lowtide.private import inductor, partitioning
from lowtide.private.captured import Captured
from lowtide.progress import current

FREES_AT_ONCE: dict[str, Any] = {"allow_buffer_reuse": False}
"""Inductor's setting for all that a budget is held for: by itself it keeps a buffer that nobody reads any
more for the next of its size, however late that one comes. On GPT and Llama (4 x 512) this took 9 and 13 MB
of 85 and 93 at the smallest budget, and no step was measurably faster for it.
"""

Run = Callable[..., Any]

Sizes = tuple[int, ...]
"""The sizes that a call gives to a graph which leaves them open."""

P = ParamSpec("P")
T = TypeVar("T")

_SLOTS = 150_000
"""Of 8 bytes: such a frame needs a chunk of 2 MiB, and leaves 0.8 MiB of it to those that it calls. Only what
is written to takes memory.
"""


def with_room_for_frames(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose calls share one chunk of Python's frames, instead of 16 KiB after 16 KiB.

    From 3.11 on Python returns a chunk to the system as soon as its first frame ends (seen in 3.11 to 3.14).
    A loop whose calls begin right at the end of a chunk so maps and unmaps memory with every one of them:
    half a million page faults while Inductor compiled GPT of 12 layers.
    """

    def roomy(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_SLOTS)
    return functools.wraps(function)(roomy)


def refuse_cuda_graphs(options: dict[str, Any]) -> None:
    """Refuse CUDA graphs, whether these settings of Inductor or the process's ask for them.

    Raises:
        PlanError: they do.
    """
    if inductor.in_force("triton.cudagraphs", options):
        raise PlanError(
            "CUDA graphs have a memory pool of their own, for which no budget can be held: use "
            "mode='max-autotune-no-cudagraphs' or none, and leave "
            "torch._inductor.config.triton.cudagraphs off"
        )


class Cutter(inductor.CustomPartitionerFn):
    """The partitioner that AOTAutograd calls.

    It can be pickled: Inductor puts a copy of it into the key of its cache.

    Args:
        options: Inductor's settings; ``None`` where graphs run call by call.
        halves: forward and backward of a joint graph.
        key: what the cut follows from, beside the graph; ``None`` where compiled code is not to be cached.
        device: whose memory counts; ``None`` for that of the graph.
    """

    def __init__(
        self,
        options: dict[str, Any] | None,
        halves: Callable[[Joint], Halves] | None = None,
        key: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.options, self._key, self._device = options, key, device
        self._halves = halves

    def __deepcopy__(self, memo: dict[int, Any]) -> Cutter:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_halves": None}

    def __call__(
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **_: Any,
    ) -> Halves:
        if self.options is not None:
            refuse_cuda_graphs({})  # what is in force while this is compiled
        partitioning.clean_joint(gm)
        static = partitioning.static_inputs(gm, static_lifetime_input_indices or ())
        fusible = None if self.options is None else partitioning.default_fusible()
        joint = Joint(partitioning.twin(gm), num_fwd_outputs, static, fusible, counted=self._device)
        if not any(call.forward for call in joint.calls) or not joint.tangents:  # nothing to decide
            return partitioning.min_cut(gm, num_fwd_outputs, static)
        return self.halves(joint)

    def halves(self, joint: Joint) -> Halves:
        """Forward and backward of a joint graph."""
        assert self._halves is not None
        return self._halves(joint)

    def uuid(self) -> str | None:
        """Says to PyTorch's cache what the cut follows from."""
        return self._key


def cutter_at(way: Way, structure: str, options: dict[str, Any] | None, key: str) -> Cutter:
    """Cuts a joint graph where it is told.

    Args:
        way: how.
        structure: of the joint graph that its storages are named in.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        key: what the cut follows from, beside the graph.
    """

    def halves(joint: Joint) -> Halves:
        if joint.structure != structure:
            raise PlanError(
                "a graph was traced differently than when its step was planned, because something that "
                "it depends on has changed. Call handle.set_budget(...) to plan again"
            )
        return way.halves(joint)

    return Cutter(options, halves, key)


def _end_compilation(joint: Joint) -> Halves:
    raise CompilationEnded


# ---- compiling ------------------------------------------------------------------------------------


def compile_graph(
    module: Any,
    inputs: Any,
    options: dict[str, Any] | None,
    cutter: Cutter | None = None,
    inner: Callable[..., Any] | None = None,
    at_once: bool = False,
) -> Any:
    """A graph as its backend compiles it.

    Args:
        module: Dynamo's graph.
        inputs: its (fake) inputs.
        options: Inductor's settings; ``None`` where graphs run call by call, as ``aot_eager`` runs them.
        cutter: cuts it into forward and backward; ``None`` for PyTorch's own partitioner.
        inner: compiles the halves in place of the backend, told by ``is_backward`` which it is.
        at_once: whether Inductor compiles the backward now, and not when it is first run.
    """
    if options is not None:
        settings = options if cutter is None else {**options, "custom_partitioner_fn": cutter}
        return inductor.compile_with(module, inputs, settings, inner, at_once)
    return inductor.aot_autograd(
        fw_compiler=inner or inductor.boxed_nop,
        bw_compiler=functools.partial(inner, is_backward=True) if inner else inductor.boxed_nop,
        partition_fn=cutter or partitioning.plain_partition,
        keep_inference_input_mutations=True,
    )(module, inputs)


class CapturedGraph:
    """A captured graph, compiled as often as plans have cuts for it.

    Args:
        captured: the graph.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        wishes: a digest of the regions that are marked in it.
    """

    def __init__(self, captured: Captured, options: dict[str, Any] | None, wishes: str = "") -> None:
        self.captured, self.options, self._wishes = captured, options, wishes
        self._open = captured.open_sizes
        self._joint: Joint | None = None
        self._compiled: dict[Way, Run] = {}

    @property
    def facts(self) -> list[Any]:
        """What its cuts follow from, in JSON's words; known before it is traced."""
        return [self._wishes, self.captured.facts]

    @property
    def joint(self) -> Joint:
        """Its forward and backward as one graph, once it is traced and if it has a backward."""
        assert self._joint is not None
        return self._joint

    @property
    def has_readable_text(self) -> bool:
        """Whether what Inductor generates for it says what it takes: it is Python, and for one size."""
        return self._written_at_once and not any(partitioning.free_sizes(self.joint.module))

    @property
    def _written_at_once(self) -> bool:
        """Whether Inductor writes Python for it, and for one size: its backward is not left for later."""
        return not self._open and inductor.writes_python(self.options or {})

    def trace(self) -> Joint | None:
        """Its joint graph; ``None`` where it has no backward. Nothing is compiled."""
        if self._joint is not None:
            return self._joint

        def meet(joint: Joint) -> Halves:
            self._joint = joint
            raise CompilationEnded

        options, cutter = self._uncached(), Cutter(self.options, meet)
        with contextlib.suppress(CompilationEnded):
            self.captured.compile(
                lambda module, inputs: compile_graph(module, inputs, options, cutter, inductor.boxed_nop)
            )
        return self._joint

    def run_plain(self) -> Run:
        """The graph compiled as `torch.compile` does."""
        return self.captured.compile(lambda module, inputs: compile_graph(module, inputs, self.options))

    def run_as(self, way: Way, inner: Callable[..., Any] | None = None) -> Run:
        """The graph compiled so that it is cut in this way.

        Args:
            way: how it is cut.
            inner: as of `compile_graph`, where it is not compiled so yet.
        """
        if way not in self._compiled:
            current().say("compiling the step as planned", silent=True)
            cutter = cutter_at(way, self.joint.structure, self.options, self._key(way))
            self._compiled[way] = self._compile(cutter, inner)
        return self._compiled[way]

    def is_kept(self, way: Way) -> bool:
        """Whether PyTorch keeps the graph on disk, cut in this way. Nothing is traced."""
        with contextlib.suppress(CompilationEnded):
            self._compiled[way] = self._compile(Cutter(self.options, _end_compilation, self._key(way)))
        return way in self._compiled

    def _key(self, way: Way) -> str:
        """Says to PyTorch's cache, beside the graph, how it is cut."""
        facts = [own_facts(), self._wishes, way.facts]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    @with_room_for_frames
    def _compile(self, cutter: Cutter, inner: Callable[..., Any] | None = None) -> Run:
        at_once = self._written_at_once  # part of PyTorch's key on disk
        return self.captured.compile(
            lambda module, inputs: compile_graph(module, inputs, self.options, cutter, inner, at_once)
        )

    def _uncached(self) -> dict[str, Any] | None:
        return None if self.options is None else {**self.options, **inductor.UNCACHED}


class PartGraph(CapturedGraph):
    """A captured graph that is a part of a step.

    Called, it asks ``choose`` which of its compiled forms runs with these sizes. The first one runs call by
    call under the cut that takes the least memory, and is what a step is recorded with.

    Args:
        captured, options: as of `CapturedGraph`.
        choose: says what a call runs.
        recording: the recording that is under way, if any.
        device: whose memory counts.
    """

    def __init__(
        self,
        captured: Captured,
        options: dict[str, Any] | None,
        choose: Callable[[PartGraph, Sizes], Run],
        recording: Callable[[], Recording | None],
        device: torch.device,
    ) -> None:
        super().__init__(captured, options)
        self._device, self._choose, self._recording = device, choose, recording
        self.candidates: CandidateCuts | None = None  # none for what has no backward
        self._at_sizes: dict[Sizes, CandidateCuts] = {}
        self._shelf = open_shelf(options)  # there is none while it is compiled call by call, uncached
        self.smallest: Run = self._compile_call_by_call()
        if self.candidates is None:
            self.smallest = self.run_plain()

    def __call__(self, *args: Any) -> Any:
        return self._choose(self, tuple(args[at] for at in self._open))(*args)

    def candidates_at(self, sizes: Sizes) -> CandidateCuts:
        """The candidate cuts of the graph, with what they take at these sizes."""
        assert self.candidates is not None
        if not sizes:
            return self.candidates
        if sizes not in self._at_sizes:
            joint = replace(self.candidates.joint, size=self.captured.sizes_at(sizes))
            self._at_sizes = {sizes: CandidateCuts(joint, self.options)}
        return self._at_sizes[sizes]

    # ---- call by call ----------------------------------------------------------------------------

    def _compile_call_by_call(self) -> Run:
        options, cutter = self._uncached(), Cutter(self.options, self._meet, device=self._device)
        return self.captured.compile(
            lambda module, inputs: compile_graph(module, inputs, options, cutter, self._run_by_call)
        )

    def _meet(self, joint: Joint) -> Halves:
        """Keep the joint graph, and cut it where it takes the least memory."""
        self._joint, self.candidates = joint, (found := CandidateCuts(joint, self.options))
        shelf, key = self._shelf, cache_key("", self.options, 0, joint.facts)
        known = shelf.find(key) if shelf is not None else None
        if known is not None:
            found.smallest = frozenset(known)
        elif shelf is not None:
            shelf.keep(key, sorted(found.smallest))
        return cut(joint, found.smallest)

    def _run_by_call(
        self, module: fx.GraphModule, inputs: Any, *, is_backward: bool = False, **_: Any
    ) -> Run:
        """Runs a half call by call, and tells the recording."""
        run = inductor.boxed_nop(module, inputs)
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        output = next(iter(reversed(module.graph.nodes)))
        returned = [getattr(node, "name", "") for node in output.args[0]]

        def forward(args: list[Any]) -> Any:
            recording = self._recording()
            if recording is None or self.candidates is None:
                return run(args)
            call = recording.forward(self, self._by_key(names, args))
            found = run(args)
            count = self.candidates.joint.forward_outputs
            outputs = self._by_key(returned[:count], found[:count])
            saved = self._by_key(returned[count:], found[count:])
            recording.end_forward(call, outputs, saved)
            return found

        def backward(args: list[Any]) -> Any:
            recording = self._recording()
            call = recording.backward(self, self._by_key(names, args)) if recording is not None else None
            found = run(args)
            if recording is not None and call is not None:
                recording.end_backward(call)
            return found

        half = backward if is_backward else forward
        half._boxed_call = True  # type: ignore[attr-defined]
        return half

    def _by_key(self, names: Sequence[str], tensors: Sequence[Any]) -> dict[Key, torch.Tensor]:
        assert self.candidates is not None
        joint, found = self.candidates.joint, {}
        for name, tensor in zip(names, tensors, strict=True):
            node = joint.names.get(name)
            if node is not None and node in joint.key_of and partitioning.storage_of(tensor) is not None:
                found[joint.key_of[node]] = tensor
        return found
