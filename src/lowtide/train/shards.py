"""Checkpoints of runs with several ranks: a file from each rank that holds something of its own, and one
manifest that makes them count.

Each file holds pieces of whole parameters and of their optimizer state, with where they lie, so a run can go
on at another number of ranks. Where FSDP shards parameters over the data-parallel ranks, a piece is some rows
of what a tensor-parallel rank holds. They are written as `lowtide.train.checkpoint` writes: a temporary name,
flushed, renamed; the manifest comes last and from one rank, when every file is down. A rank that dies on the
way leaves files that no manifest names, and the checkpoint before stays the newest.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.parallel.checkpoint import partitions_of
from lowtide.parallel.partition import Partition
from lowtide.run.limit.optimizer_need import own_share
from lowtide.train import checkpoint
from lowtide.train.checkpoint import CheckpointError
from lowtide.train.ranks import Ranks

FORMAT = 2
_WEIGHT = "weight"


@dataclass(frozen=True)
class Manifest:
    """A checkpoint in a folder.

    Attributes:
        step: optimizer steps done.
        run: what `save` was told about the run.
        files: its files, with their SHA-256.
    """

    step: int
    run: dict[str, Any]
    files: dict[str, str]


def save(
    folder: Path,
    step: int,
    modules: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer,
    run: dict[str, Any],
    ranks: Ranks,
) -> None:
    """Write this rank's part, and with all parts there the manifest. A collective: every rank calls it.

    Raises:
        CheckpointError: a rank could not write; on every rank. What was there stays valid.
    """
    mine: tuple[str, str] | str | None = None
    if ranks.data.rank == 0 or any(
        _is_sharded(parameter) for module in modules for parameter in module.parameters()
    ):
        name = f"step-{step:08d}-{ranks.rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            content = list(_pieces(modules, optimizer, ranks))
            digest, temporary = checkpoint.write(
                folder, lambda file: torch.save(content, file), f"{name}-{os.getpid()}.tmp"
            )
            data = folder / f"{name}-{digest[:12]}.pt"
            checkpoint.rename(temporary, data)
            mine = data.name, digest
        except (OSError, RuntimeError) as error:
            mine = str(getattr(error, "strerror", None) or error)
    found = ranks.gather(mine)
    _raise_any(folder, found)
    problem = ""
    if ranks.rank == 0:
        about = {
            "format": FORMAT,
            "step": step,
            "files": dict(item for item in found if item is not None),
            "run": run,
        }
        try:
            checkpoint.finish(folder, step, about)
        except (OSError, RuntimeError) as error:
            problem = str(getattr(error, "strerror", None) or error)
    _raise_any(folder, ranks.gather(problem))


def newest(folder: Path, ranks: Ranks) -> Manifest:
    """The newest undamaged checkpoint in a folder; a damaged one is passed over with a warning. A collective.

    Raises:
        CheckpointError: there is none.
    """

    def read(step: int) -> Manifest:
        manifest, problem = _read(folder, step, ranks)
        problems = [text for text in ranks.gather(problem) if text]
        if problems or manifest is None:
            raise checkpoint.Damaged(problems[0])
        return manifest

    return checkpoint.newest(folder, read, warns=ranks.rank == 0)


def format_of(folder: Path) -> int | None:
    """The format of the newest checkpoint whose manifest can be read, ``None`` without one."""
    for step in reversed(checkpoint.steps(folder)):
        try:
            return int(json.loads(checkpoint.manifest(folder, step).read_text(encoding="utf-8"))["format"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


@torch.no_grad()
def load(
    folder: Path, manifest: Manifest, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer
) -> None:
    """Fill this rank's parts of the parameters and of their optimizer state from whatever ranks wrote the
    files.

    Raises:
        CheckpointError: the files hold another model.
    """
    wanted = dict(_targets(modules))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in wanted}
    for file in manifest.files:
        try:
            # read when a parameter is put together
            content = torch.load(folder / file, map_location="cpu", weights_only=True, mmap=True)
        except (pickle.UnpicklingError, RuntimeError, OSError) as error:
            raise CheckpointError(f"{file} holds something else than tensors and plain values") from error
        for piece in content:
            if piece["name"] in found:
                found[piece["name"]].append(piece)
    for name, (tensor, where) in wanted.items():
        if not found[name]:
            raise CheckpointError(f"the checkpoint does not hold {name}: it is of another model")
        _fill(name, tensor, where, _whole(found.pop(name)), optimizer)


def _whole(pieces: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A whole parameter and its optimizer state from the pieces that ranks wrote."""
    entries: dict[str, Tensor] = {}
    for piece in _joined(pieces):
        dimension = piece["dimension"]
        for key, tensor in piece["tensors"].items():
            if dimension is None or tensor.ndim == 0:
                entries[key] = tensor
                continue
            target = entries.setdefault(key, tensor.new_zeros(piece["shape"]))
            at = 0
            for start, stop in piece["slices"]:
                target.narrow(dimension, start, stop - start).copy_(
                    tensor.narrow(dimension, at, stop - start)
                )
                at += stop - start
    return entries


def _joined(pieces: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The pieces, those that are rows of one put together."""
    parts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for piece in pieces:
        if "rows" not in piece:
            yield piece
            continue
        start, stop, length = piece["rows"]
        whole = parts.setdefault(tuple(map(tuple, piece["slices"])), {**piece, "tensors": {}})["tensors"]
        for key, tensor in piece["tensors"].items():
            if tensor.ndim == 0:
                whole[key] = tensor
            else:
                whole.setdefault(key, tensor.new_zeros((length, *tensor.shape[1:])))[start:stop] = tensor
    yield from parts.values()


def _pieces(
    modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, ranks: Ranks
) -> Iterator[dict[str, Any]]:
    """What this rank writes of each parameter and buffer: what no rank before it holds."""
    for name, (tensor, where) in _targets(modules):
        cut = where is not None and where.dimension is not None
        sharded = _is_sharded(tensor)
        if (not cut and ranks.tensor.rank) or (not sharded and ranks.data.rank):
            continue
        tensors = {_WEIGHT: tensor.detach()}
        tensors.update(
            {key: item for key, item in optimizer.state.get(tensor, {}).items() if isinstance(item, Tensor)}
        )
        if sharded:
            yield {
                "name": name,
                "shape": where.shape if cut and where is not None else tuple(tensor.shape),
                "dimension": where.dimension if cut and where is not None else None,
                "slices": where.slices() if cut and where is not None else [],
                "rows": (*_rows(tensor), tensor.shape[0]),
                "tensors": {key: own_share(item) for key, item in tensors.items()},
            }
            continue
        if not cut or where is None or where.dimension is None:
            yield {
                "name": name,
                "shape": tuple(tensor.shape),
                "dimension": None,
                "slices": [],
                "tensors": tensors,
            }
            continue
        dimension = where.dimension
        yield {
            "name": name,
            "shape": where.shape,
            "dimension": dimension,
            "slices": where.slices(),
            "tensors": {
                key: item if item.ndim == 0 else item.narrow(dimension, 0, where.valid).clone()
                for key, item in tensors.items()
            },
        }


def _targets(modules: Sequence[nn.Module]) -> Iterator[tuple[str, tuple[Any, Partition | None]]]:
    """Parameters and saved buffers by their name in the whole model, with where they lie in the whole."""
    for module in modules:
        cuts = partitions_of(module)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        for name, tensor in module.state_dict(keep_vars=True).items():
            yield name, (parameters.get(name, tensor), cuts.get(name))


def _fill(
    name: str,
    tensor: Tensor,
    where: Partition | None,
    entries: dict[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    expected = tuple(tensor.shape) if where is None else where.shape
    if tuple(entries[_WEIGHT].shape) != tuple(expected):
        raise CheckpointError(
            f"{name} has the shape {tuple(entries[_WEIGHT].shape)} in the checkpoint and {tuple(expected)} "
            "in the model"
        )

    def part(item: Tensor) -> Tensor:
        own = item if where is None or item.ndim == 0 else where.take(item)
        if item.ndim and _is_sharded(tensor):
            return _sharded_like(tensor, own[slice(*_rows(tensor))].to(tensor.device, copy=True))
        return own.to(tensor.device, copy=True)

    tensor.copy_(part(entries.pop(_WEIGHT)))
    if entries:
        optimizer.state[tensor] = {key: part(item) for key, item in entries.items()}


def _is_sharded(tensor: Any) -> bool:
    """Whether FSDP left this process some rows of the tensor only."""
    return hasattr(tensor, "to_local")


def _rows(tensor: Any) -> tuple[int, int]:
    """The rows of a sharded tensor that this process holds: those of ``torch.chunk``, as FSDP deals them."""
    mesh, length = tensor.device_mesh, tensor.shape[0]
    each = -(-length // mesh.size())
    start = min(length, mesh.get_local_rank() * each)
    stop = min(length, start + each)
    assert tensor.to_local().shape[0] == stop - start, (
        f"{tuple(tensor.shape)} is not sharded by rows: {tensor.placements}"
    )
    return start, stop


def _sharded_like(tensor: Any, local: Tensor) -> Tensor:
    """The sharded tensor of which this process holds ``local``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _read(folder: Path, step: int, ranks: Ranks) -> tuple[Manifest | None, str]:
    """A manifest whose files are as they were written, each checked by one rank; or what is wrong."""
    name = checkpoint.manifest(folder, step).name
    try:
        about = json.loads(checkpoint.manifest(folder, step).read_text(encoding="utf-8"))
        if about["format"] != FORMAT:
            return None, f"checkpoint {name} was written by a run of one process: resume it with one"
        files = {Path(file).name: str(digest) for file, digest in about["files"].items()}
        for number, (file, digest) in enumerate(files.items()):
            if number % ranks.size == ranks.rank:
                with (folder / file).open("rb") as opened:
                    if hashlib.file_digest(opened, "sha256").hexdigest() != digest:
                        return None, f"checkpoint {name} is damaged: {file} is not what was written"
        return Manifest(int(about["step"]), dict(about["run"]), files), ""
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"checkpoint {name} is damaged ({type(error).__name__}: {error})"


def _raise_any(folder: Path, found: Sequence[Any]) -> None:
    for rank, item in enumerate(found):
        if isinstance(item, str) and item:
            raise CheckpointError(f"rank {rank} cannot write a checkpoint to {str(folder)!r}: {item}")
