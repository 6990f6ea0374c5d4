"""Stand between autograd and the kernels: every operation of a thread comes to an interceptor, and ATen does
not know.

A `TorchDispatchMode` changes what it watches: ATen asks whether one is active and then takes other ways
(losses mask out of place, backward makes second gradients, gradients that meet are added out of place). Here
a kernel of our own stands at a dispatch key that PyTorch keeps for uses outside it (``Fake``), below autograd
and above the devices. The key is let in for a thread while an `Interceptor` is active on it, so that
everything else of PyTorch runs as it does in a plain step. Views have no kernel there and pass by; tensor
subclasses come apart above it. The kernel is C++ (``run/record/cpp/recorder.cpp``): the recorder that is on
takes what it can, and what it leaves goes on to Python's kernels (`_Kernel`), at a key of their own.

Two more keys are for writes, which any code and any thread may make to a tensor that a replay starts from: in
place, or through ``.data``, where no version counter moves. One key, above autograd, is let in for a thread
that runs a recorded forward. The other is one that every thread has in. Only operations that write have
kernels at them (``run/record/cpp/writes.h``), so all others cost nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lowtide import private
from lowtide.errors import shorten
from lowtide.native import extension, takes_long
from lowtide.ops import has_plain_storage, operation_named, returns_views

_KEY = "Fake"
_PARSED = private.dispatch_key(_KEY)
WRITES_KEY = "TESTING_ONLY_GenericMode"
"""The key at which operations that write have a kernel, above autograd; nothing else uses it."""
_WRITES = private.dispatch_key(WRITES_KEY)
_STATE = "lowtide.interception"
_include = private.include_key
_included = private.is_key_included
_exclude, _excluded = private.exclude_key, private.is_key_excluded


class Interceptor:
    """Sees the operations of a thread while it is active, the innermost first; nothing that it runs itself is
    seen by any.
    """

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation: pass it on with `proceed`, and return what it returned."""
        raise NotImplementedError

    @property
    def decides(self) -> bool:
        """Whether this interceptor decides now what autograd keeps of this thread's operations."""
        return False

    cpp: Any = None
    """the C++ recorder that takes what it can, or `None`"""
    _thread_state: _Thread | None = None

    def start(self) -> None:
        """See the operations of this thread from here on, until `stop`."""
        with _LOCK:
            _register()
            native = _registration().native
        thread = self._thread_state = _thread()
        _update(thread, self, [self])
        thread.choose()
        if thread.cpp is not None:
            native.activate(thread.cpp)
        _include(_PARSED, True)

    @property
    def is_active(self) -> bool:
        """Whether it was started, and not stopped since."""
        return self._thread_state is not None

    def stop(self) -> None:
        """See no more operations. Any thread may call this, also while later interceptors are active."""
        thread, self._thread_state = self._thread_state, None
        if thread is None:
            return
        _update(thread, self, [])
        thread.choose()
        if thread.cpp is not None:
            _registration().native.activate(thread.cpp)
        if not thread.active and _THREAD.level < 0:
            _include(_PARSED, False)  # on another thread `_Kernel` sees that nothing is active

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _ThreadState(threading.local):
    """Of the thread itself: which interceptor runs an operation now, by its place among the active ones, -1
    where none does; and the dispatch keys of that operation. Of a backward on several threads (one for each
    device) each is in an operation of its own.
    """

    level = -1
    keyset: Any = None


_THREAD = _ThreadState()


class _Thread:
    """What is active on a thread; the threads on which autograd runs a backward share it with the one that
    asked for that.
    """

    __slots__ = ("active", "cpp")

    def __init__(self) -> None:
        self.active: list[Interceptor] = []
        self.cpp: Any = None  # the C++ recorder that is on (`choose`), or none

    def choose(self) -> None:
        """Turn on the C++ recorder of the innermost interceptor, and the one that was on off. Where others
        would see its operations, too, none is on.
        """
        if self.cpp is not None:
            self.cpp.on = False
        self.cpp = self.active[-1].cpp if self.active else None
        for other in self.active[:-1]:
            if other.decides or other.cpp is None:
                self.cpp = None
        if self.cpp is not None:
            self.cpp.on = True


def _thread() -> _Thread:
    thread = _known_thread()
    if thread is None:
        thread = _Thread()
        private.set_thread_object(_STATE, thread)
    return thread


def _known_thread() -> _Thread | None:
    return private.thread_object(_STATE) if private.has_thread_object(_STATE) else None


def cpp_here() -> Any:
    """The C++ recorder that is on for this thread, or ``None``; C++ asks on the threads of a backward."""
    thread = _known_thread()
    return thread.cpp if thread is not None else None


def any_watched() -> bool:
    """Whether any tape may have to be told of a write."""
    return bool(_registration.cache_info().currsize) and _registration().native.any_watched()


def interceptors() -> list[Interceptor]:
    """The interceptors that are active on this thread, outermost first."""
    thread = _known_thread()
    return thread.active if thread is not None else []


def _update(thread: Any, one: Interceptor, becomes: list[Any]) -> None:
    """Begin or end one of a thread's active interceptors. While the changed list is made, a collection of
    garbage may stop another interceptor; storing the list would make that one active again, so it is made
    anew.
    """
    while True:
        before = thread.active
        after = [*before, *becomes]
        if one in before:
            after.remove(one)
        if thread.active is before:
            thread.active = after
            return


def drop_idle_key() -> None:
    """Take the keys out of this thread where no interceptor is active, and no tape has to be told. After a
    backward autograd restores the keys that were in when it began; until the next operation Dynamo would
    compile for a thread with the key.
    """
    thread = _known_thread()
    if thread is not None and not thread.active and _THREAD.level < 0:
        _include(_PARSED, False)
    if _included(_WRITES) and not any_watched():
        _include(_WRITES, False)


def proceed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Pass an operation on to the next interceptor, and from the outermost to its kernel; outside of all,
    just run it.
    """
    running, thread = _THREAD, _known_thread()
    if thread is None or running.level < 0:
        return func(*args, **kwargs)
    if running.level == 0:
        return _run(func, running.keyset & _BELOW, args, kwargs)
    running.level -= 1
    try:
        return thread.active[running.level].operation(func, tuple(args), kwargs)
    finally:
        running.level += 1


class unseen:
    """A context: operations in the block pass by every interceptor, and writes unseen, without Python."""

    __slots__ = ("_before", "_excluded")

    def __enter__(self) -> None:
        self._before, self._excluded = _included(_PARSED), _excluded(_WRITES)
        if self._before:
            _include(_PARSED, False)
        _exclude(_WRITES, True)

    def __exit__(self, *_: object) -> None:
        if self._before:
            if interceptors():
                _include(_PARSED, True)
            else:
                drop_idle_key()
        _exclude(_WRITES, self._excluded)


@contextmanager
def suspended() -> Iterator[None]:
    """Suspend the active interceptors for the block. Interceptors that become active within the block see its
    operations.
    """
    thread, included = _thread(), _included(_PARSED)
    before, thread.active = thread.active, []
    thread.choose()
    _include(_PARSED, False)
    try:
        yield
    finally:
        # those that have stopped meanwhile, as garbage does, stay so
        thread.active = [one for one in before if one.is_active]
        thread.choose()
        _include(_PARSED, included)


def watchers() -> list[Any]:
    """Who sees this thread's operations: the interceptors, then the dispatch modes (a trace on fake tensors
    is one), outermost first.
    """
    return [*interceptors(), *private.mode_stack()]


def is_evicted(tensor: torch.Tensor) -> bool:
    """Whether a recomputing scope around this code brings ``tensor`` back for anyone who saves it, so that
    saving it costs nothing. Under a limit layers save what they would in a plain step, and so in a graph that
    is compiled: there they do not ask, as Dynamo may be kept out of this module.
    """
    return any(one.will_evict(tensor) for one in watchers() if hasattr(one, "will_evict"))


@contextmanager
def without_modes() -> Iterator[None]:
    """No interceptor and no dispatch mode sees the operations in the block: they are neither recorded nor
    made fake.
    """
    with private.without_dispatch_modes(), unseen():
        yield


class _Kernel:
    """Python's kernel for one overload, at the key of such kernels (`_PYTHON_KEY`)."""

    __slots__ = ("func", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.func: Any = None

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        func = self.func
        if func is None:
            func = self.func = _overload(self.name)
        thread = _known_thread()
        if thread is None or _THREAD.level >= 0 or not thread.active:
            with unseen():
                return _run(func, keyset & _BELOW, args, kwargs)
        _include(_PARSED, False)
        active, running = thread.active, _THREAD
        running.level, running.keyset = len(active) - 1, keyset
        try:
            return active[-1].operation(func, args, kwargs)
        except Exception as error:
            shorten(error)
            raise
        finally:
            running.level = -1
            if thread.active:
                _include(_PARSED, True)


class _RecordStream(_Kernel):
    """The kernel of ``tensor.record_stream(stream)``, which no interceptor sees: its schema says that it
    writes the tensor, but it leaves the bytes as they are.

    PyTorch's allocator records a stream only for memory that it gave out itself. So a storage that shares its
    bytes with a lazy clone gets a copy of its own first, and for a borrowed storage the stream is recorded on
    the tensor that lent the bytes.
    """

    __slots__ = ()

    def __call__(self, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        storage = args[0].untyped_storage()
        lender = private.lender_of(storage)
        if lender is not None:
            args = (lender, *args[1:])
        elif has_plain_storage(args[0]) and not isinstance(args[0], private.FakeTensor):
            private.unshare(storage)
        with unseen():
            return _run(_overload(self.name), keyset & _BELOW, args, kwargs)


def _overload(name: str) -> Any:
    """The overload of a dispatcher's name: aten::add.Tensor, or aten::relu where it has none."""
    return operation_named(name.replace("::", ".") + ("" if "." in name else ".default"))


def _run(func: Any, below: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The kernel of an operation, from below the key on.

    Python gets numbers where PyTorch had wrapped them in tensors (``x * 0.5``), and takes them back only from
    the top.
    """
    if (len(args) > 1 and type(args[1]) in _NUMBERS and _takes_tensor(func)) or (
        args and type(args[0]) in _NUMBERS
    ):
        with private.below_autograd():
            return func(*args, **kwargs)
    return private.redispatch(func, below, *args, **kwargs)


@functools.cache
def _takes_tensor(func: Any) -> bool:
    """Whether an overload's second argument is a tensor."""
    return str(private.schema_of(func).arguments[1].type) in ("Tensor", "Optional[Tensor]")


_DEVICES = ("CPU", "CUDA", "PrivateUse1")
_NUMBERS = frozenset({int, float, bool, complex})
_BELOW = private.keys_below(_KEY)


_MARKS = "profiler::"
"""Operations of this namespace begin and end spans of PyTorch's profiler: they touch no tensor. FSDP2 calls
two of them in each of its hooks."""

_RECORDER = Path(__file__).parent / "run" / "record" / "cpp" / "recorder.cpp"
_PYTHON_KEY = "TESTING_ONLY_GenericWrapper"
"""The key of Python's kernels where there are compiled ones, which call them there: nothing else uses it."""


class _Registered:
    """The kernels at the keys, for the life of the process.

    Attributes:
        libraries: hold our kernels, by namespace.
        known: overloads that have been looked at.
        definitions: what was defined then (`_register`).
        native: the C++ recorder; it has kernels of its own, which call those in Python for what they do not
            take.
    """

    def __init__(self) -> None:
        # first: whoever waits may interrupt it
        self.native: Any = extension(_RECORDER, "lowtide_recorder")
        self.fallback = private.kernel_library("_")
        for key in (_KEY, WRITES_KEY):
            self.fallback.fallback(key, torch.library.fallthrough_kernel, False)
        self.libraries: dict[str, Any] = {}
        self.known: set[str] = set()
        self.definitions: tuple[Any, ...] = ()
        private.before_storage_resizes(self._resizes)

    def _resizes(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Python is about to resize a storage."""
        if nbytes < storage.nbytes():
            self.native.before_change(private.storage_address(storage), True)


_LOCK = threading.RLock()
"""Held while kernels are put at the key, which every thread shares, and where `_registration` is called."""


@functools.cache
def _registration() -> _Registered:
    return _Registered()


def cpp_module() -> Any:
    """The C++ recorder as a module. Before it records it has to know functions of Python
    (`lowtide.run.record.engine`).

    Raises:
        LowtideError: it cannot be compiled; says how to get a compiler.
    """
    with _LOCK:
        return _registration().native


def _register() -> None:
    """Put a kernel of ours at the key, for every overload that there is by now and that is neither a view nor
    made of others. What an interruption left out is done by the next call.
    """
    registered = _registration()
    # These change where operations may have been added: to list them all takes milliseconds. Python defines
    # them in `torch.library`, C++ in libraries that come with a module or by name.
    definitions = len(sys.modules), len(torch.ops.loaded_libraries), *private.defined_operations()
    if registered.definitions == definitions:
        return
    for key in (_KEY, WRITES_KEY):
        private.let_higher_order_operators_pass(key)
    if new := set(private.all_operation_names()) - registered.known:
        _put_kernels(registered, new)
        registered.known |= new
    registered.definitions = definitions


def register_ahead() -> bool:
    """Do now what the first interceptor of a process would wait for, a tenth of a second. Where the C++
    recorder has to be compiled first, that is left to the first that needs it. Returns whether it is done.
    """
    with _LOCK:
        done = bool(_registration.cache_info().currsize) or not takes_long(_RECORDER, "torch")
        if done:
            _register()
        return done


def _put_kernels(registered: _Registered, new: set[str]) -> None:
    """Put kernels at the keys for these overloads, where none of ours is yet."""
    libraries, has = registered.libraries, private.has_kernel_at
    views = _overloads_where(returns_views)
    ours: list[tuple[str, str]] = []
    for name in sorted(new):
        if name in views or name.startswith(_MARKS) or is_made_of_others(name):
            continue
        namespace, _, rest = name.partition("::")
        if namespace not in libraries:
            libraries[namespace] = private.kernel_library(namespace)
        if name == "aten::record_stream":
            if not has(name, _KEY):
                libraries[namespace].impl(rest, _KEY, _RecordStream(name), True)
            continue
        if not has(name, _KEY):
            ours.append((namespace, rest))
        if not has(name, _PYTHON_KEY):
            libraries[namespace].impl(rest, _PYTHON_KEY, _Kernel(name), True)
    registered.native.let_in(ours)


def is_made_of_others(name: str) -> bool:
    """Whether an overload (``aten::linear``) has no kernel of its own anywhere: only the operations that it
    calls are seen.
    """
    has = private.has_kernel_at
    return has(name, "CompositeImplicitAutograd") and not any(has(name, device) for device in _DEVICES)


def _overloads_where(wanted: Callable[[Any], bool]) -> set[str]:
    """The overloads whose schemas are ``wanted``."""
    return {
        schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        for schema in private.all_schemas()
        if wanted(schema)
    }
