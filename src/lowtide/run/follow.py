"""The recorder of a step under a plan: it follows the script of an earlier step, or is listened to for
one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.ops import draws, has_plain_storage, hidden_statistics, op_info, written_tensors
from lowtide.run.direct import Director, PlanDirector, ScopeDirector
from lowtide.run.drawn import drawn
from lowtide.run.record import Recorder, Unrecordable
from lowtide.run.rehearse import ASK, PASS, WRITE, Listener, Recipe, Script, tensors_around
from lowtide.run.tape import LiveValue, Node, Ref, flat_results

_NO_KEYWORD = (torch.Tensor, torch.Generator, list, tuple)
"""An operation with such a keyword argument takes a closer look."""


class Follower(Recorder):
    """A recorder that asks only where its script does not say what there is to do.

    Args:
        director: decides what is recorded and what stays.
        script: what an earlier step under the same plan learned.
        listener: hears what this step learns.
        options: as of `lowtide.run.record.Recorder`.
    """

    def __init__(
        self,
        director: Director,
        *,
        script: Script | None = None,
        listener: Listener | None = None,
        **options: Any,
    ) -> None:
        super().__init__(director, **options)
        self.listener = listener
        self._script = script.entries if script is not None else ()
        self._line = 0
        self._following = script is not None

    @contextmanager
    def region(self, director: ScopeDirector) -> Iterator[None]:
        """A scope inside what this recorder records looks for the recorder, so no script may leave it."""
        if self.listener is not None and isinstance(self.director, PlanDirector):
            self.listener.stay = True
        with super().region(director):
            yield

    def gives_up(self, tensor: torch.Tensor) -> bool:
        """As the recorder says; where a layer goes by it, no script may leave the recorder."""
        found = super().gives_up(tensor)
        if found and self.listener is not None:
            self.listener.asked()
        return found

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As the script says, or as the recorder does where there is none."""
        line = self._line
        if line < len(self._script):
            known, kind, advance = self._script[line]
            if known is func:
                self._line = line + 1
                if kind == PASS:
                    result = self._call(func, args, kwargs)
                    if advance:
                        self.skip(advance)
                    return result
                if kind == WRITE:
                    return self._writing(func, args, kwargs, advance)
                if type(kind) is Recipe and not self.check and not self._blank:
                    return self._recorded(func, args, kwargs, kind)
            else:
                self.depart()
        if self.listener is not None:
            return self._heard(func, args, kwargs)
        return super().operation(func, args, kwargs)

    def _heard(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A dispatch, with what there is to learn from it."""
        assert self.listener is not None
        info, seen, newest, untouched = op_info(func), self._seen, self._newest, True
        kind: int | Recipe = ASK
        if info.is_view or info.waits:
            kind = PASS
        elif private.in_backward():
            pass  # what it runs hangs on who holds the gradients
        elif self.director.passes(info) and not hidden_statistics(info, args):
            kind = WRITE if info.written else PASS
            keys = {
                private.storage_key(t) for t in written_tensors(info, args, kwargs) if has_plain_storage(t)
            }
            untouched = not any(keys & known.keys() for known in (self._given, self._held))
        director = self.director
        at, departed = (director.at, director.departed) if isinstance(director, PlanDirector) else (0, 0)
        result = super().operation(func, args, kwargs)
        if (
            isinstance(director, PlanDirector)
            and self._newest is not newest
            and (director.at, director.departed) == (at + 1, departed)
        ):
            node = self._newest() if self._newest is not None else None
            if node is not None and not any(move >= 0 for move in director.moves):
                kind = Recipe.of(node, info, result) or ASK
        self.listener.heard(func, kind, self._seen - seen, untouched, tensors_around(args, kwargs, result))
        return result

    def _writing(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], advance: int) -> Any:
        """An operation that is not recorded and writes to tensors that were there before."""
        info = op_info(func)
        written = written_tensors(info, args, kwargs)
        if self._held:
            self._copy_on_write(written)
        result = self._call(func, args, kwargs)
        self._forget(written, info)
        self.skip(advance)
        return result

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recipe: Recipe) -> Any:
        """An operation that is recorded as an earlier step did it."""
        if kwargs and any(isinstance(value, _NO_KEYWORD) for value in kwargs.values()):
            return super().operation(func, args, kwargs)
        node = Node(func, self._order, recipe.device)
        self._order += 1
        inputs: dict[int, LiveValue] = {}
        try:
            node.args = [self._noted(item, inputs) for item in args]
        except Unrecordable:
            return super().operation(func, args, kwargs)
        node.kwargs = kwargs
        if recipe.info.random and draws(recipe.info, args, kwargs):
            result = drawn(node, self._call, args, kwargs, fills=False)
        else:
            result = self._call(func, args, kwargs)
        self.skip(1)
        node.reads(list(inputs.values()))
        node.claimed = recipe.claimed
        flat = (result,) if recipe.single else flat_results(result)
        for position in recipe.outputs:
            node.outputs.append((position, weakref.ref(self._give(node, flat[position]))))
        return result

    def _noted(self, item: Any, inputs: dict[int, LiveValue]) -> Any:
        """An argument with references in place of tensors, whose values join ``inputs``."""
        if not isinstance(item, torch.Tensor):
            return [self._noted(part, inputs) for part in item] if isinstance(item, (list, tuple)) else item
        given = self._given.get(private.storage_key(item))
        value = given[0] if given is not None and type(given[0].node) is Node else self._value_of(item)
        inputs[id(value)] = value
        return Ref(value, item)

    @property
    def follows(self) -> bool:
        """Whether the step has followed its script so far."""
        return self._following

    def depart(self) -> None:
        """From here on this step is another than its script says."""
        self._script, self._following = (), False
