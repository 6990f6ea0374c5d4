"""What lowtide needs to know of an operation, read off its schema once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from lowtide import private

_UNINITIALIZED = {
    "aten.empty.memory_format",
    "aten.empty_like.default",
    "aten.empty_strided.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
    "aten.empty_permuted.default",
    "aten.empty.names",
    "aten.new_empty.out",
}
_FILLS = {
    "copy_",
    "fill_",
    "zero_",
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "geometric_",
    "log_normal_",
    "cauchy_",
}
_RUNNING_STATISTICS = {
    "aten.native_batch_norm.default": 5,
    "aten._native_batch_norm_legit.default": 5,
    "aten.cudnn_batch_norm.default": 5,
    "aten.miopen_batch_norm.default": 5,
    "aten._batch_norm_with_update.default": None,
    "aten._batch_norm_with_update_functional.default": None,
}
_REAL_ONLY = {  # on fake tensors what they reserve for backward is empty
    "aten.mkldnn_rnn_layer.default",
    "aten._cudnn_rnn.default",
    "aten.miopen_rnn.default",
}
_LOOSE = {  # a workspace or table, parts of which are never written and never read
    "aten.mkldnn_rnn_layer.default": (3,),
    "aten._ctc_loss.default": (1,),
    "aten._ctc_loss.Tensor": (1,),
}
_READS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NEVER_WRITTEN = ("unused",)
"""Names of attention's results that no kernel writes."""
_OF_DROPOUT = ("rng_state", "philox_seed", "philox_offset")
"""Names of attention's results that kernels write where it drops out, for backward to draw the same."""
_UNNAMED_OF_DROPOUT = {  # the flash-attn package's own, whose schemas name no result
    "flash_attn._flash_attn_forward.default": (3,),
    "flash_attn._flash_attn_varlen_forward.default": (3,),
}
_COLLECTIVE_NAMESPACES = {
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "c10d_functional",
    "_dtensor",
    "fsdp",
    "lowtide_ring",
    "symm_mem",
}
_WAITS = {"_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default"}
_BETWEEN_TWO = {"c10d.send.default", "c10d.recv_.default", "c10d.recv_any_source_.default"}
IS_COLLECTIVE = "it is a collective"
"""Why an operation is not replayable that only all ranks can run again."""
FUNCTIONAL_COLLECTIVES = {
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_reduce_.default",
    "_c10d_functional.all_to_all_single.default",
    "_c10d_functional.broadcast.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "lowtide_ring.attention.default",
}
_UNREPLAYABLE = {
    "aten.set_.source_Storage": "it swaps a tensor's storage",
    "aten.set_.source_Storage_storage_offset": "it swaps a tensor's storage",
    "aten.set_.source_Tensor": "it swaps a tensor's storage",
    "aten.resize_.default": "it resizes a tensor in place",
    "aten.resize_as_.default": "it resizes a tensor in place",
    "aten._cudnn_init_dropout_state.default": "PyTorch keeps what it makes for all that follows",
}
SAYS_WHERE = {"index", "start", "end"}
"""Names of arguments, whole numbers, that say where in a tensor the operations of `WRITES_PART` write."""
WRITES_PART = ("_backward", "_scatter")
"""How names of operations end that write into a part of a tensor: ``select_backward``, ``slice_scatter``."""
_WITH_STATE = {"dropout", "train", "dropout_state"}
"""Arguments of an RNN's kernel (cuDNN, MIOpen), which draws from the last and overwrites it, whatever its
schema says.
"""


@dataclass(frozen=True, slots=True)
class OpInfo:
    """Facts about one overload.

    Attributes:
        name: qualified name, for example ``aten.add.Tensor``.
        is_view: its schema says that every output is a view of an argument and nothing is written.
        written: positions of arguments that it writes (keyword-only ones by name).
        fills: a written argument's old content is not looked at.
        uninitialized: its outputs hold whatever was in memory.
        random: it draws random numbers: PyTorch's tag says so, or it takes a generator or a probability of
            dropout.
        running_statistics: positions of batch-norm statistics that it updates in training mode, whatever its
            schema says.
        training_position: which argument tells training mode; ``None`` when it always trains.
        reason: why it can never be replayed, else empty.
        loose: positions of results that are compared with nothing, because parts of them are whatever was in
            memory.
        real_only: fake tensors do not show how much it allocates.
        dropout_position: which argument is the probability of a dropout inside it.
        loose_undropped: positions of further results that no kernel writes while that probability is 0.
        returns_written: all that it returns are arguments that it wrote (some fake kernels return copies of
            them).
        collective: it is a function of its arguments on all the ranks of a group, and can run again where all
            of them run it again.
        waits: it returns its argument, once what is under way on it is done, or in a wrapper that waits.
        state_positions: which arguments are the dropout's probability and training mode, where it draws from
            a state of its own that it overwrites.
        reads_values: what it returns, or a shape, depends on values: so may what user code does next.
        where: positions of arguments that say where in a tensor it writes, and not how much.
        sends: it sends to another rank or receives from one, which may come to it only after what this rank
            does next: it is never waited for.
    """

    name: str
    is_view: bool
    written: tuple[int | str, ...]
    fills: bool
    uninitialized: bool
    random: bool
    running_statistics: tuple[int, ...]
    training_position: int | None
    reason: str
    loose: tuple[int, ...] = ()
    real_only: bool = False
    dropout_position: int | None = None
    loose_undropped: tuple[int, ...] = ()
    returns_written: bool = False
    collective: bool = False
    waits: bool = False
    sends: bool = False
    state_positions: tuple[int, int] | None = None
    reads_values: bool = False
    where: tuple[int, ...] = ()

    @property
    def updates(self) -> bool:
        """Whether it overwrites its first argument with what it makes of it (``add_``)."""
        return self.written == (0,) and self.returns_written and not self.fills

    @property
    def replays_plainly(self) -> bool:
        """Whether a replay is the same call with the same arguments, or a copy of one that it updates, where
        a dropout inside it is off.

        Everything else is Python's (`lowtide.run.record.special`); the C++ recorder leaves it alone.
        """
        special = self.written and not self.updates
        special = special or self.running_statistics or self.collective or self.reason
        random = self.random and self.dropout_position is None
        return not special and not random and self.state_positions is None

    def draws(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call with these arguments draws random numbers: attention without dropout does not."""
        position = self.dropout_position
        if position is None or not self.random:
            return self.random
        return bool(args[position] if position < len(args) else kwargs.get("dropout_p", 0.0))

    def why_once(self, args: Sequence[Any]) -> str:
        """Why a call with these arguments may not run again, or nothing."""
        if self.state_positions is not None and all(args[at] for at in self.state_positions):
            return "it draws from a state that it overwrites"
        return self.reason


@cache
def op_info(func: private.OpOverload) -> OpInfo:
    """The facts about an overload, worked out once."""
    schema = private.schema_of(func)
    name = str(func)
    written = tuple(
        argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    if func.namespace == "c10d" and schema.name.endswith("_"):  # whatever its schema says
        written = (0,)
    returns = [r for r in schema.returns if "Tensor" in str(r.type)]
    base = name.split(".")[1] if name.startswith("aten.") else ""
    out_variant = any(isinstance(w, str) for w in written)
    reason = _UNREPLAYABLE.get(name, "")
    places = {argument.name: place for place, argument in enumerate(schema.arguments)}
    dropout = places.get("dropout_p")

    def called(names: tuple[str, ...]) -> tuple[int, ...]:
        return tuple(p for p, r in enumerate(schema.returns) if dropout is not None and r.name in names)

    if func.namespace in _COLLECTIVE_NAMESPACES:
        reason = IS_COLLECTIVE
    return OpInfo(
        name=name,
        is_view=returns_views(schema),
        written=written,
        fills=base in _FILLS or out_variant,
        uninitialized=name in _UNINITIALIZED,
        random=torch.Tag.nondeterministic_seeded in func.tags
        or dropout is not None
        or any("Generator" in str(argument.type) for argument in schema.arguments),
        running_statistics=(3, 4) if name in _RUNNING_STATISTICS else (),
        training_position=_RUNNING_STATISTICS.get(name),
        reason=reason,
        loose=_LOOSE.get(name) or called(_NEVER_WRITTEN),
        real_only=name in _REAL_ONLY,
        dropout_position=dropout,
        loose_undropped=_UNNAMED_OF_DROPOUT.get(name) or called(_OF_DROPOUT),
        returns_written=bool(returns)
        and all(r.alias_info is not None and r.alias_info.is_write for r in returns),
        collective=name in FUNCTIONAL_COLLECTIVES,
        waits=name in _WAITS,
        sends=name in _BETWEEN_TWO,
        state_positions=(places["dropout"], places["train"]) if places.keys() >= _WITH_STATE else None,
        reads_values=not _READS_VALUES.isdisjoint(func.tags),
        where=tuple(
            place
            for place, argument in enumerate(schema.arguments)
            if argument.name in SAYS_WHERE
            and schema.name.endswith(WRITES_PART)
            and "Tensor" not in str(argument.type)
        ),
    )


def operation_named(name: str) -> private.OpOverload | private.OpOverloadPacket | None:
    """The overload (``aten.gelu.default``), or the packet of all overloads (``aten.gelu``), of that name."""
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, (private.OpOverload, private.OpOverloadPacket)) else None


def returns_views(schema: Any) -> bool:
    """Whether all that an overload does, by its schema, is to return views of its arguments."""
    if schema.name == "aten::_unsafe_view":  # whatever its schema says
        return True
    aliases = [one.alias_info for one in schema.returns if "Tensor" in str(one.type)]
    if not aliases or any(alias is None or alias.is_write for alias in aliases):
        return False
    return not any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)


def tensors_of(items: Any) -> Iterator[torch.Tensor]:
    """The tensors in an operation's arguments or results, in order."""
    if isinstance(items, torch.Tensor):
        yield items
    elif isinstance(items, (tuple, list, dict)):
        for item in items.values() if isinstance(items, dict) else items:
            yield from tensors_of(item)


def written_tensors(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the call writes by its schema."""
    found: list[torch.Tensor] = []
    for where in info.written:
        if isinstance(where, str):
            found.extend(tensors_of(kwargs.get(where)))
        elif where < len(args):
            found.extend(tensors_of(args[where]))
    return found


class Call:
    """One call of an operation: its tensors, and which of them it reads and writes.

    Attributes:
        func, args, kwargs: the call.
        info: the facts about its operation.
        inputs: the tensors among its arguments that each lie in one storage.
        others: the rest of them: sparse ones and the like.
        keys: the storages of its inputs.
        written: the inputs that it writes by its schema.
        writes_others: whether it writes one of the others.
        statistics: running statistics that it updates, by position, whatever its schema says. Their old
            content does not enter the outputs.
        redone: ids of the inputs that a replay has to write, too: all written ones but statistics.
        unread: ids of the inputs whose old content does not matter: statistics, and what it fills.
    """

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.info = info = op_info(func)
        self.inputs: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        for item in (*args, *kwargs.values()) if kwargs else args:
            for tensor in (item,) if isinstance(item, torch.Tensor) else tensors_of(item):
                (self.inputs if has_plain_storage(tensor) else self.others).append(tensor)
        self.keys = set(map(private.storage_key, self.inputs))
        written = written_tensors(info, args, kwargs) if info.written else []
        self.written = list(filter(has_plain_storage, written))
        self.writes_others = len(self.written) < len(written)
        self.statistics: dict[int, torch.Tensor] = {}
        position = info.training_position
        if info.running_statistics and (position is None or args[position]):
            self.statistics = {p: args[p] for p in info.running_statistics if args[p] is not None}
        self.redone = set(map(id, self.written)) - set(map(id, self.statistics.values()))
        filled = filter(covers_storage, self.written) if info.fills else ()
        self.unread = {id(tensor) for tensor in (*filled, *self.statistics.values())}

    @property
    def overwritten(self) -> list[torch.Tensor]:
        """The inputs that the call writes, running statistics among them, each once."""
        if not self.statistics:
            return self.written
        return list({id(tensor): tensor for tensor in (*self.written, *self.statistics.values())}.values())

    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self.info.draws(self.args, self.kwargs)

    @property
    def reason(self) -> str:
        """Why it may not run again, or nothing."""
        return self.info.why_once(self.args)

    @property
    def loose(self) -> tuple[int, ...]:
        """Positions of the results that are compared with nothing: no kernel has written what lies there."""
        undropped = self.info.loose_undropped
        return self.info.loose if not undropped or self.draws() else self.info.loose + undropped

    def fresh(self, results: Sequence[Any]) -> list[int]:
        """Positions of the results on storages that no input has, one for each storage."""
        if self.info.returns_written:
            return []
        found: dict[int, int] = {}
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor) and has_plain_storage(result):
                found.setdefault(private.storage_key(result), position)
        return [position for key, position in found.items() if key not in self.keys]


def has_plain_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a strided view of one storage of its own device: not sparse, nested, quantized, a
    wrapper, or without memory (on the meta device, or zeros that autograd stands for)."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_mkldnn:
        return False
    if type(tensor) in _PLAIN:
        return not (tensor.is_meta or private.is_zero_tensor(tensor))
    if tensor.is_meta and not isinstance(tensor, private.FakeTensor):
        return False
    return not private.is_zero_tensor(tensor) and not is_wrapper(tensor) and not _is_hollow(tensor)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _is_hollow(tensor: torch.Tensor) -> bool:
    """Whether the tensor is of a subclass that answers every operation itself and has no memory under it
    (`torch.masked`).
    """
    if type(tensor) in _PLAIN or isinstance(tensor, private.FakeTensor):
        return False
    return private.answers_itself(tensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a subclass that holds other tensors (DTensor and the like)."""
    return is_wrapper_type(type(tensor))


def is_wrapper_type(kind: type) -> bool:
    """Whether tensors of this type hold other tensors."""
    return kind is not torch.Tensor and hasattr(kind, "__tensor_flatten__")


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether the tensor is made of indices and values."""
    return tensor.layout in _SPARSE and not is_wrapper(tensor)


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def is_nested_without_layout(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a nested one of PyTorch's own kind, not jagged: one block whose rows' sizes no
    strided tensor has."""
    return tensor.is_nested and tensor.layout is torch.strided and not is_wrapper(tensor)


def covers_storage(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements are all the bytes of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()


def enter(
    table: dict[int, Any],
    storage: torch.UntypedStorage,
    entry: Any,
    on_end: Callable[[], object] = lambda: None,
) -> None:
    """Enter ``entry`` into a table, under the storage's address. When the storage ends the entry is removed,
    and ``on_end`` called.
    """
    key = private.storage_address(storage)

    def ended(_: object) -> None:
        table.pop(key, None)
        on_end()

    table[key] = (entry, weakref.ref(storage, ended))
