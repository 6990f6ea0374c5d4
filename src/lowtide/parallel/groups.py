"""Who shares a layer: a process group, a `DeviceMesh`, or nobody, behind one small value.

Every function and layer of `lowtide.parallel` takes ``group``: a ``torch.distributed.ProcessGroup``, a
``DeviceMesh`` (of one dimension, or with a dimension called ``tp``), a model-parallel unit (the ``mpu`` of
Megatron-LM and DeepSpeed), a `TensorGroup`, or ``None``. ``None`` is every process, or this process alone
where ``torch.distributed`` has not been set up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist

from lowtide import private
from lowtide.parallel.errors import ParallelError


@dataclass(frozen=True, eq=False)
class TensorGroup:
    """The ranks among which a layer is split.

    Attributes:
        rank: this process's place among them.
        size: how many they are; ``t`` in the papers.
        name: how collectives find the process group, empty for a process alone.
        process_group: the group itself, ``None`` for a process alone.
    """

    rank: int = 0
    size: int = 1
    name: str = ""
    process_group: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorGroup) and (self.name, self.rank, self.size) == (
            other.name,
            other.rank,
            other.size,
        )

    def __hash__(self) -> int:
        return hash((self.name, self.rank, self.size))

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_name, (self.name, self.rank, self.size)

    def global_rank(self, rank: int) -> int:
        """The place in the world of the group's ``rank``."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)


ALONE = TensorGroup()


Ranks = Literal["tp", "dp", "pp"]
"""Which ranks: those that split tensors, those that split the batch, or the stages of a pipeline. These are
the names of a mesh's dimensions."""

_IN_UNITS: dict[Ranks, tuple[str, ...]] = {
    "tp": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    "dp": ("data_parallel",),
    "pp": ("pipeline_model_parallel", "pipe_parallel"),
}
"""What the functions of a model-parallel unit call them. A unit that has the first name of ``tp`` means
another group by the last one: that of tensors and stages."""


def tensor_group(group: Any = None, ranks: Ranks = "tp") -> TensorGroup:
    """The group behind whatever names it.

    Args:
        group: a process group, a ``DeviceMesh``, a model-parallel unit, a `TensorGroup`, or ``None`` for
            every process there is. A model-parallel unit (``mpu``) is any object or module with a function
            ``get_tensor_model_parallel_group``, as Megatron-LM's ``parallel_state``;
            ``get_slice_parallel_group`` and ``get_model_parallel_group`` mean the same. It may have functions
            for the rank and the world size, too.
        ranks: which dimension of a mesh, and which ranks of a unit: those that split tensors (``"tp"``) or
            the batch (``"dp"``), or the stages of a pipeline (``"pp"``).

    Raises:
        ParallelError: a mesh of several dimensions none of which is called as ``ranks`` says, a group that
            this process is not in, a unit without this group or in contradiction to it, or something else
            altogether.

    >>> tensor_group().size
    1
    """
    if isinstance(group, TensorGroup):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return ALONE
    found = process_group(group, ranks)
    return ALONE if found is None or found.size() == 1 else _of_process_group(found)


def process_group(group: Any, ranks: Ranks = "tp") -> Any:
    """The process group behind whatever names it, as of `tensor_group`; ``None`` is of a unit that has no
    other rank.

    Raises:
        ParallelError: as of `tensor_group`.
    """
    if isinstance(group, TensorGroup):
        return group.process_group
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return _of_mesh(group, ranks)
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return group
    if name := next((name for name in _IN_UNITS[ranks] if _functions(group, name)), ""):
        return _of_unit(group, name)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ParallelError(
            "this process is not in the group given: build the layer only on the group's members"
        )
    raise ParallelError(
        f"group={group!r}: give a torch.distributed process group, a DeviceMesh, an mpu (an object with "
        f"get_{_IN_UNITS[ranks][0]}_group), or None for every process"
    )


def _of_process_group(group: Any) -> TensorGroup:
    return TensorGroup(group.rank(), group.size(), group.group_name, group)


def _of_mesh(mesh: Any, ranks: Ranks) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if ranks in names:
        return mesh.get_group(ranks)
    shares = {"tp": "shares tensors", "dp": "shares the batch", "pp": "has the stages"}[ranks]
    raise ParallelError(
        f"a mesh of {mesh.ndim} dimensions {names or '(unnamed)'} does not say which one {shares}: "
        f"call one of them {ranks!r}, or give that dimension alone, mesh['name']"
    )


def _functions(unit: Any, name: str) -> dict[str, Any]:
    """The functions in which a model-parallel unit speaks of these ranks."""
    found = {what: getattr(unit, f"get_{name}_{what}", None) for what in ("group", "rank", "world_size")}
    return {what: function for what, function in found.items() if callable(function)}


def _of_unit(unit: Any, name: str) -> Any:
    """The process group of a model-parallel unit, whose rank and world size are those of the group."""
    what = f"group={getattr(unit, '__name__', type(unit).__name__)}"
    functions = _functions(unit, name)
    if "group" not in functions:
        raise ParallelError(
            f"{what} has get_{name}_{next(iter(functions))}, but no get_{name}_group: add this function, "
            "which returns the process group, or give the process group itself"
        )
    told = {key: function() for key, function in functions.items()}
    found = told.pop("group")
    if found is None and told.get("world_size") != 1:
        raise ParallelError(
            f"{what}: get_{name}_group returned None: initialize its groups first, or give the process group "
            "itself"
        )
    if found is not None:
        found = process_group(found)
        here = {"rank": found.rank(), "world_size": found.size()}
        for key, number in told.items():
            if number != here[key]:
                raise ParallelError(
                    f"{what}: get_{name}_{key} returned {number}, but the process group of get_{name}_group "
                    f"has {here[key]}: give the process group itself, or mend the one that is wrong"
                )
    return found


def _from_name(name: str, rank: int, size: int) -> TensorGroup:
    """A pickled group, found again in the process that loads it."""
    if size == 1:
        return ALONE
    try:
        found = tensor_group(private.process_group_named(name))
    except (RuntimeError, ValueError, LookupError) as error:
        raise ParallelError(
            f"a layer shared by {size} ranks was unpickled where their process group {name!r} does not "
            "exist: save state dicts (lowtide.parallel.sharded_state_dict) rather than modules"
        ) from error
    if found.size != size:
        raise ParallelError(
            f"a layer shared by {size} ranks was unpickled in a group of {found.size}: save state dicts "
            "rather than modules"
        )
    return found
