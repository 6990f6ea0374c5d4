"""Who shares a layer: a process group, a `DeviceMesh`, or nobody, behind one small value.

Every function and layer of `lowtide.parallel` takes ``group``: a ``torch.distributed.ProcessGroup``, a
``DeviceMesh`` (of one dimension, or with a dimension called ``tp``), a `TensorGroup`, or ``None``. ``None``
is every process, or this process alone where ``torch.distributed`` has not been set up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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


def tensor_group(group: Any = None) -> TensorGroup:
    """The group behind whatever names it.

    Args:
        group: a process group, a ``DeviceMesh``, a `TensorGroup`, or ``None`` for every process there is.

    Raises:
        ParallelError: a mesh of several dimensions none of which is called ``tp``, a group that this process
            is not in, or something else altogether.

    >>> tensor_group().size
    1
    """
    if isinstance(group, TensorGroup):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        return _of_process_group(dist.group.WORLD)
    if hasattr(group, "mesh_dim_names") and hasattr(group, "get_group"):
        return _of_process_group(_of_mesh(group))
    if dist.is_available() and isinstance(group, dist.ProcessGroup):
        return _of_process_group(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ParallelError(
            "this process is not in the group given: build the layer only on the group's members"
        )
    raise ParallelError(
        f"group={group!r}: give a torch.distributed process group, a DeviceMesh, or None for every process"
    )


def _of_process_group(group: Any) -> TensorGroup:
    if group.size() == 1:
        return ALONE
    return TensorGroup(group.rank(), group.size(), group.group_name, group)


def _of_mesh(mesh: Any) -> Any:
    if mesh.ndim == 1:
        return mesh.get_group()
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        return mesh.get_group("tp")
    raise ParallelError(
        f"a mesh of {mesh.ndim} dimensions {names or '(unnamed)'} does not say which one shares tensors: "
        "call one of them 'tp', or give that dimension alone, mesh['name']"
    )


def _from_name(name: str, rank: int, size: int) -> TensorGroup:
    """A pickled group, found again in the process that loads it."""
    if size == 1:
        return ALONE
    try:
        found = _of_process_group(private.process_group_named(name))
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
