"""A graph that Dynamo captured, compiled as often as a step's plan has ways to cut it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide.compiled.backend import compile_graph
from lowtide.compiled.cut import Cutter, Halves, cut
from lowtide.compiled.joint import Joint, Key
from lowtide.compiled.recording import Recording
from lowtide.compiled.variants import Menu
from lowtide.errors import PlanError
from lowtide.private import inductor, partitioning
from lowtide.private.captured import Captured
from lowtide.version import __version__

Run = Callable[..., Any]

Sizes = tuple[int, ...]
"""The sizes that a call gives to a graph which leaves them open."""


class Region:
    """One captured graph.

    Called, it asks ``choose`` which of its compiled forms runs with these sizes. The first one runs call by
    call under the cut that takes the least memory, and is what a step is recorded with.

    Args:
        captured: the graph.
        options: Inductor's settings; ``None`` under ``aot_eager``.
        choose: says what a call runs.
        recording: the recording that is under way, if any.
    """

    def __init__(
        self,
        captured: Captured,
        options: dict[str, Any] | None,
        choose: Callable[[Region, Sizes], Run],
        recording: Callable[[], Recording | None],
    ) -> None:
        self.captured, self.options = captured, options
        self._choose, self._recording = choose, recording
        self._open = captured.open_sizes
        self.menu: Menu | None = None  # none for what has no backward
        self._menus: dict[Sizes, Menu] = {}
        self._compiled: dict[frozenset[Key] | None, Run] = {}
        self.smallest: Run = self._compile_call_by_call()
        if self.menu is None:
            self.smallest = captured.compile(lambda module, inputs: compile_graph(module, inputs, options))

    def __call__(self, *args: Any) -> Any:
        return self._choose(self, tuple(args[at] for at in self._open))(*args)

    def menu_at(self, sizes: Sizes) -> Menu:
        """Ways to cut the graph, with what they take at these sizes."""
        assert self.menu is not None
        if not sizes:
            return self.menu
        if sizes not in self._menus:
            joint = replace(self.menu.joint, size=self.captured.sizes_at(sizes))
            self._menus = {sizes: Menu(joint, self.options)}
        return self._menus[sizes]

    def run_as(self, stored: frozenset[Key] | None) -> Run:
        """The graph compiled so that ``stored`` goes from forward to backward, or as `torch.compile` does."""
        if stored not in self._compiled:
            assert self.menu is not None
            cutter = None if stored is None else _Planned(stored, self.menu.joint.program, self.options)
            self._compiled[stored] = self.captured.compile(
                lambda module, inputs: compile_graph(module, inputs, self.options, cutter)
            )
        return self._compiled[stored]

    # ---- call by call ----------------------------------------------------------------------------

    def _compile_call_by_call(self) -> Run:
        options = None if self.options is None else {**self.options, **inductor.UNCACHED}
        return self.captured.compile(
            lambda module, inputs: compile_graph(module, inputs, options, _Smallest(self), self._told)
        )

    def meet(self, joint: Joint) -> Halves:
        """Keep the joint graph, and cut it where it takes the least memory."""
        self.menu = Menu(joint, self.options)
        return cut(joint, self.menu.smallest)

    def _told(self, module: fx.GraphModule, inputs: Any, *, is_backward: bool = False, **_: Any) -> Run:
        """Runs a half call by call, and tells the recording."""
        run = inductor.boxed_nop(module, inputs)
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        output = next(iter(reversed(module.graph.nodes)))
        returned = [getattr(node, "name", "") for node in output.args[0]]

        def forward(args: list[Any]) -> Any:
            recording = self._recording()
            if recording is None or self.menu is None:
                return run(args)
            call = recording.forward(self, self._by_key(names, args))
            found = run(args)
            count = self.menu.joint.forward_outputs
            outputs = self._by_key(returned[:count], found[:count])
            saved = self._by_key(returned[count:], found[count:])
            recording.forward_ended(call, outputs, saved)
            return found

        def backward(args: list[Any]) -> Any:
            recording = self._recording()
            call = recording.backward(self, self._by_key(names, args)) if recording is not None else None
            found = run(args)
            if recording is not None and call is not None:
                recording.backward_ended(call)
            return found

        told = backward if is_backward else forward
        told._boxed_call = True  # type: ignore[attr-defined]
        return told

    def _by_key(self, names: Sequence[str], tensors: Sequence[Any]) -> dict[Key, torch.Tensor]:
        assert self.menu is not None
        joint, found = self.menu.joint, {}
        for name, tensor in zip(names, tensors, strict=True):
            node = joint.names.get(name)
            if node is not None and node in joint.key_of and _lies_plainly(tensor):
                found[joint.key_of[node]] = tensor
        return found


class _Smallest(Cutter):
    """Cuts a region's graph when it is first seen; that is never cached."""

    def __init__(self, region: Region) -> None:
        super().__init__(region.options)
        self._region = region

    def halves(self, joint: Joint) -> Halves:
        return self._region.meet(joint)

    def uuid(self) -> None:
        return None


class _Planned(Cutter):
    """Cuts a joint graph where it is told; what Inductor makes of that is cached.

    Args:
        stored: storages that go from forward to backward.
        program: digest of the joint graph that they are named in.
        options: Inductor's settings; ``None`` under ``aot_eager``.
    """

    def __init__(self, stored: frozenset[Key], program: str, options: dict[str, Any] | None) -> None:
        super().__init__(options)
        self.stored, self.program = sorted(stored), program

    def halves(self, joint: Joint) -> Halves:
        if joint.program != self.program:
            raise PlanError(
                "a graph was traced in another way than when its step was planned: something that it depends "
                "on changed between two steps. Call handle.set_budget(...) to plan again"
            )
        return cut(joint, self.stored)

    def uuid(self) -> str:
        facts = [__version__, torch.__version__, self.program, self.stored]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _lies_plainly(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and partitioning.storage_of(value) is not None
