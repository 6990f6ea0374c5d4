"""What a model keeps outside its modules holds no fake tensor after a trace.

Models cache tensors where nobody lends them fakes: in the globals of a Python module, on a class, in a helper object, behind
`functools.lru_cache`. What a trace on fake tensors leaves there would reach the next real step, which cannot read it.

Before a trace the places that the model's code can name are looked at, one shallow copy each. After it, the trace's own storages tell whether
any is still held. Only then are the places compared: what holds a fake is put back to what it was. What is held elsewhere is looked for among
all objects of the process.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lowtide import private
from lowtide.errors import TraceError
from lowtide.trace.fake import Faker

MOST_ENTRIES = 10_000
"""Containers with more entries are not copied: data, not caches."""
MOST_PLACES = 20_000
"""So many places are looked at before a trace. Fakes that are kept in others are found by way of all objects, which takes longer."""
_DEEP = 3
_MISSING = object()
_CONTAINERS = (dict, list, set, deque, tuple, frozenset)
_DATA = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset, torch.dtype, torch.device, torch.Size)
_INERT = frozenset(_DATA) - {tuple, frozenset} | {BuiltinFunctionType, torch.Tensor, torch.nn.Parameter}
_OTHERS = sys.stdlib_module_names | {"torch", "numpy", "lowtide"}
_OF_MODELS = frozenset({"types", "argparse", "collections", "functools", "dataclasses", "_thread"})
"""Modules of the standard library whose objects models keep things in."""
_INERT_FAR = _INERT | {FunctionType, ModuleType, type}
_MODULES_OWN = frozenset(vars(torch.nn.Module()))
_TOGETHER = 256
_Cached = type(functools.lru_cache(lambda: None))


class Follower(Protocol):
    """What has followed the tensors of a trace: a `lowtide.trace.eager.Tracer`."""

    def holds_any(self) -> bool:
        """Whether any of them is still there."""
        ...


class _Place:
    """One container or namespace and a copy of what was in it."""

    __slots__ = ("before", "now", "owner")

    def __init__(self, owner: Any, now: Any, before: Any) -> None:
        self.owner = owner
        self.now = now
        self.before = before


class Outside:
    """The places outside the modules that a model's code can name, as they were when this was made.

    Args:
        modules: whose classes, attributes and code lead to the places; what they hold themselves is not among these.
        others: functions and objects that lead to more.

    Attributes:
        tracer: says whether tensors of the trace are still held.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], others: Sequence[Any] = ()) -> None:
        self.tracer: Follower | None = None
        self._places: list[_Place] = []
        self._seen: set[int] = set()
        self._cached: dict[int, Any] = {}
        self._ahead: list[tuple[list[Any], int, int]] = []  # values to look at, how deep in containers, how many Python modules on
        inside = list({id(m): m for root in modules for m in root.modules()}.values())
        self._seen.update(map(id, inside))
        kinds = {type(module) for module in inside}
        bases = {base for kind in kinds for base in kind.__mro__}
        for kind in (*kinds, *(bases - kinds)):
            if not _is_foreign(kind.__module__):
                further = 1 if kind in kinds else 0
                self._class(kind, further)
                namespace = sys.modules.get(kind.__module__)
                if namespace is not None:
                    self._names(namespace.__dict__, further)
        for module in inside:
            own = [item for name, item in vars(module).items() if type(item) not in _INERT and name not in _MODULES_OWN]
            kept = [entry for item in own if issubclass(type(item), _CONTAINERS) for entry in _entries(item)]  # of containers of the module
            self._ahead.append(([item for item in own if not issubclass(type(item), _CONTAINERS)] + kept, _DEEP, 1))
        self._ahead.append((list(others), _DEEP, 1))
        for values, deep, further in self._ahead:  # it grows meanwhile
            for item in values:
                if type(item) not in (_INERT if further >= 0 else _INERT_FAR):
                    self._visit(item, deep, further)
        del self._ahead

    # ---- before -----------------------------------------------------------------------------------------------------------------

    def _names(self, names: dict[str, Any], further: int) -> None:
        if id(names) in self._seen:
            return
        self._seen.add(id(names))
        before = names.copy()
        self._places.append(_Place(names, names, before))
        self._ahead.append(([item for name, item in before.items() if name != "__builtins__"], 2 if further else 1, further - 1))

    def _class(self, kind: type, further: int) -> None:
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        names = kind.__dict__
        self._places.append(_Place(kind, names, names.copy()))
        self._ahead.append((list(names.values()), 2, further - 1))

    def _visit(self, item: Any, deep: int, further: int) -> None:
        """Look at a value: at what is in it, ``deep`` containers down; at the names that its code uses, ``further`` Python modules on."""
        kind = type(item)
        if kind in _INERT or id(item) in self._seen or len(self._places) > MOST_PLACES:
            return
        if kind is FunctionType:
            if further >= 0:
                self._function(item, further)
        elif issubclass(kind, type):
            if further >= 0 and not _is_foreign(item.__module__):
                self._class(item, further)
        elif kind is ModuleType or issubclass(kind, ModuleType):
            if further >= 0 and kind is ModuleType and not _is_foreign(item.__name__):
                self._names(item.__dict__, further)
        elif kind is _Cached:
            self._seen.add(id(item))
            self._cached[id(item)] = item
            self._visit(item.__wrapped__, deep, further)
        elif kind in (staticmethod, classmethod, MethodType):
            self._visit(item.__func__, deep, further)
        elif kind is property:
            self._visit(item.fget, deep, further)
        elif kind is functools.partial:
            for part in (item.func, *item.args, *item.keywords.values()):
                self._visit(part, deep, further)
        elif issubclass(kind, _CONTAINERS):
            if len(item) > MOST_ENTRIES:
                return
            self._seen.add(id(item))
            if not issubclass(kind, (tuple, frozenset)):
                self._places.append(_Place(item, item, _copy(item)))
            if deep > 1:
                for entry in _entries(item):
                    if type(entry) not in _INERT:
                        self._visit(entry, deep - 1, further)
        else:
            attributes = _attributes(item)
            if attributes is not None and deep > 0:
                self._seen.add(id(item))
                self._seen.add(id(attributes))
                before = attributes.copy()
                self._places.append(_Place(item, attributes, before))
                for entry in before.values():
                    self._visit(entry, deep - 1, further)

    def _function(self, function: FunctionType, further: int) -> None:
        self._seen.add(id(function))
        if not _is_foreign(function.__globals__.get("__name__")):
            self._names(function.__globals__, further)
        if _is_foreign(function.__module__) and not (function.__module__ or "").startswith("lowtide"):
            return
        for cell in function.__closure__ or ():
            content = _content(cell)
            self._places.append(_Place(cell, cell, content))
            self._visit(content, 2, further)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._visit(default, 2, further)
        if function.__dict__:
            self._visit(function.__dict__, 3, further)

    # ---- after ------------------------------------------------------------------------------------------------------------------

    def put_back(self, mode: FakeTensorMode) -> None:
        """Let every place that holds a fake of ``mode`` hold what it held before. Others are left as they are."""
        fouled: set[int] = set()
        for place in reversed(self._places):  # what is in a place comes after it
            if _put_back(place, mode, fouled):
                fouled.add(id(place.owner))
        for cached in self._cached.values():
            if any(holds(item, mode) for item in gc.get_referents(cached)):
                cached.cache_clear()


@contextmanager
def nothing_outside(faker: Faker, modules: Sequence[torch.nn.Module], *others: Any) -> Iterator[Outside]:
    """After the block nothing holds a fake tensor that was made in it, and what was in its place before is there again.

    A cache of `functools.lru_cache` that has taken in a fake is empty afterwards: its entries cannot be told apart.

    Args:
        faker: whose mode makes the fakes; it is empty after the block.
        modules: whose code runs in the block. What they hold themselves, `lowtide.trace.fake.borrowed` puts back.
        others: functions and objects that run in it, too.

    Raises:
        TraceError: a fake stood where nobody can tell what was there before. It has been taken out.
    """
    outside = Outside(modules, others)
    failed = True
    try:
        yield outside
        failed = False
    finally:
        lent = faker.give_up()

        def held() -> bool:
            return any(storage() is not None for storage in lent) or (outside.tracer is not None and outside.tracer.holds_any())

        if failed or held():  # an error that is under way holds frames, and these hold fakes
            outside.put_back(faker.mode)
            if failed or (held() and _still_held(held)):
                unsure = _taken_out(faker.mode)
                if unsure and not failed:
                    raise TraceError(
                        f"the model keeps tensors in {unsure}, and what was there before is not known: keep them in a module, or trace with real=True"
                    )


def _still_held(held: Callable[[], bool]) -> bool:
    """Whether something is held by more than its own cycles."""
    gc.collect()
    return held()


def _put_back(place: _Place, mode: FakeTensorMode, fouled: set[int]) -> bool:
    """Whether the place held fakes of ``mode``, itself or in what is known to be in it; if so, it holds what it held before.

    What belongs to a cache goes with it: the numbers and names beside a fake are those from before, too. Objects stay, as registries and other
    threads need them.
    """
    now, before = place.now, place.before
    if isinstance(now, CellType):
        content = _content(now)
        if content is before or not holds(content, mode):
            return False
        if before is _MISSING:
            del now.cell_contents
        else:
            now.cell_contents = before
        return True
    if isinstance(now, (dict, MappingProxyType)):
        return _names_back(place, mode, fouled)
    kept = [item for item in now if not holds(item, mode)]
    if len(kept) == len(now):
        return any(id(item) in fouled for item in now)
    known = set(map(id, before))
    kept = before if all(id(item) in known for item in kept) else kept
    now.clear()
    now.update(kept) if isinstance(now, set) else now.extend(kept)
    return True


def _names_back(place: _Place, mode: FakeTensorMode, fouled: set[int]) -> bool:
    now, before = place.now, place.before
    entries = list(dict.items(now) if isinstance(now, dict) else now.items())
    changed = [(key, item) for key, item in entries if before.get(key, _MISSING) is not item]
    foul = {key for key, item in changed if holds(item, mode) or holds(key, mode)}
    if not foul and not any(id(item) in fouled for _, item in entries):
        return False
    beside = {key for key, item in changed if issubclass(type(item), _DATA) and issubclass(type(before.get(key)), _DATA)}
    gone = {key for key in before if key not in now} if foul else set()
    for key in (*foul, *(beside - foul), *gone):
        was = before.get(key, _MISSING)
        if isinstance(place.owner, type):
            delattr(place.owner, key) if was is _MISSING else setattr(place.owner, key, was)
        elif was is _MISSING:
            del now[key]
        else:
            now[key] = was
    return True


def holds(item: Any, mode: FakeTensorMode, deep: int = 4) -> bool:
    """Whether a value is a fake tensor of ``mode`` or has one in it, ``deep`` containers or objects down."""
    kind = type(item)
    if private.is_fake_of(item, mode):
        return True
    if kind in _INERT or not deep:
        return False
    if issubclass(kind, _CONTAINERS):
        return len(item) <= MOST_ENTRIES and any(holds(entry, mode, deep - 1) for entry in _entries(item))
    attributes = _attributes(item)
    return attributes is not None and any(holds(entry, mode, deep - 1) for entry in list(attributes.values()))


def _taken_out(mode: FakeTensorMode) -> str:
    """Take the fakes of ``mode`` out of every container, cache and object of the process; returns where that may have broken something.

    Entries of containers are removed, attributes deleted, variables set to ``None``.
    """
    unsure: set[str] = set()
    wanted: list[Any] = [item for item in gc.get_objects() if private.is_fake_of(item, mode)]
    for _ in range(_DEEP):
        ids = set(map(id, wanted))
        above: list[Any] = []
        for holder in _holders(ids):
            if holder is wanted or holder is above or issubclass(type(holder), (FrameType, FakeTensor, Outside)):
                continue
            if issubclass(type(holder), (tuple, frozenset)):
                above.append(holder)
                continue
            try:
                unsure.update(_rid(holder, ids))
            except Exception:  # a container that refuses: the outputs of transformers do
                unsure.add(f"a {type(holder).__qualname__}")
        wanted = above
        if not wanted:
            break
    return ", ".join(sorted(unsure))


def _rid(holder: Any, ids: set[int]) -> list[str]:
    """Take the objects with these ids out of one that holds them; returns what was a variable or an attribute."""
    kind = type(holder)
    if kind is _Cached:
        holder.cache_clear()
    elif kind is CellType:
        holder.cell_contents = None
        return ["a variable of a function"]
    elif issubclass(kind, dict):
        return _emptied(holder, ids)
    elif issubclass(kind, (list, deque)):
        kept = [item for item in holder if id(item) not in ids]
        holder.clear()
        holder.extend(kept)
    elif issubclass(kind, set):
        holder.difference_update([item for item in holder if id(item) in ids])
    else:
        return _stripped(holder, ids)
    return []


def _holders(ids: set[int]) -> Iterator[Any]:
    """The objects of the process that refer to any of those with these ids."""
    objects = gc.get_objects()
    for start in range(0, len(objects), _TOGETHER):
        some = objects[start : start + _TOGETHER]
        if ids.isdisjoint(map(id, gc.get_referents(*some))):
            continue
        for item in some:
            if item is not objects and not ids.isdisjoint(map(id, gc.get_referents(item))):
                yield item


def _emptied(names: dict[Any, Any], ids: set[int]) -> list[str]:
    """Take entries out of a dictionary; says whose attributes or variables they were."""
    found = [key for key, item in dict.items(names) if id(item) in ids or id(key) in ids]
    name = dict.get(names, "__name__")
    module = sys.modules.get(name) if type(name) is str else None
    if module is not None and module.__dict__ is names:
        for key in found:
            names[key] = None
        return [f"{module.__name__}.{key}" for key in found]
    owners = [item for item in gc.get_referrers(names) if _attributes(item) is names]
    for key in found:
        del names[key]
    return [f"{type(item).__qualname__}.{key}" for item in owners for key in found]


def _stripped(holder: Any, ids: set[int]) -> list[str]:
    """Take attributes off an object or a class; says which."""
    if isinstance(holder, type):
        names = [name for name, item in vars(holder).items() if id(item) in ids]
    else:
        slots = [name for base in type(holder).__mro__ for name in base.__dict__.get("__slots__", ()) if isinstance(name, str)]
        names = [name for name in (*(_attributes(holder) or ()), *slots) if id(getattr(holder, name, None)) in ids]
    for name in names:
        delattr(holder, name)
    kind = holder if isinstance(holder, type) else type(holder)
    return [f"{kind.__qualname__}.{name}" for name in names]


def _entries(container: Any) -> list[Any]:
    """What is in a container; of a dictionary the keys, too. Subclasses that make entries when asked for them are not asked."""
    if issubclass(type(container), dict):
        return [part for pair in dict.items(container) for part in pair]
    return list(container)


def _copy(container: Any) -> Any:
    kind = type(container)
    return dict(dict.items(container)) if issubclass(kind, dict) and kind is not dict else container.copy()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable without a value
        return _MISSING


def _attributes(item: Any) -> dict[str, Any] | None:
    """The attributes of an object of a model's own; ``None`` for one of PyTorch's or the standard library's."""
    kind = type(item)
    if not kind.__dictoffset__ or issubclass(kind, (type, ModuleType, FunctionType)):
        return None
    if _is_foreign(kind.__module__) and kind.__module__ not in _OF_MODELS and not issubclass(kind, torch.nn.Module):
        return None
    found = vars(item)
    return found if type(found) is dict else None


def _is_foreign(name: str | None) -> bool:
    """Whether no model keeps its tensors in the Python module of that name."""
    return name is None or (name.partition(".")[0] in _OTHERS and not name.startswith("lowtide.models"))
