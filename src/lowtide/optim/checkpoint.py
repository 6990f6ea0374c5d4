"""State dicts: in the form of the wrapped optimizer, whatever lies where."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowtide import private
from lowtide.optim.errors import OptimError
from lowtide.optim.pipeline import copies_of
from lowtide.optim.placed import PlacedOptimizer
from lowtide.optim.slots import Slot
from lowtide.optim.tensors import flat_gradient, is_sharded, local

PENDING, STEPS = "delayed_pending", "delayed_steps"
_OURS = ("fused", "foreach", "capturable", "differentiable")


def show_state(optimizer: PlacedOptimizer, slot: Slot) -> None:
    """Show a slot's state in ``optimizer.state``: live tensors, and pairs of (device, host) stretches for
    what is split.
    """
    if slot.shown:
        return
    part = slot.parts()[-1]
    slot.shown = not part.fresh
    shown: dict[str, Any] = {}
    if optimizer.kernel.counts_steps:
        shown["step"] = part.step
    if optimizer.kernel.counts_steps or not part.fresh:
        shown.update(part.scalars)
        shown.update({name: slot.join(name) for name in part.state})
    if (
        all(part.master is not None for part in slot.parts())
        and slot.parameter.dtype != part.tensors()[-1].dtype
    ):
        shown["master"] = slot.join("master")
    if shown:
        optimizer.state[slot.parameter] = shown


def show_anew(optimizer: PlacedOptimizer, slot: Slot) -> None:
    """Show a slot's state as it is after an update was undone: none, if that was the first one."""
    slot.shown = False
    optimizer.state.pop(slot.parameter, None)
    if not any(part.fresh for part in slot.parts()):
        show_state(optimizer, slot)


def whole_state(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A hook after ``state_dict``: what is split becomes whole, and what a delayed update needs is added."""
    names: dict[int, Tensor] = {}
    for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        names.update(zip(packed["params"], group["params"], strict=True))
    state = state_dict["state"]
    for name, parameter in names.items():
        slot = optimizer._slots.get(parameter)
        if slot is None:
            continue
        if name in state:
            state[name] = {
                key: slot.whole(key) if isinstance(item, tuple) else item for key, item in state[name].items()
            }
        if optimizer.delayed and slot.host is not None:
            more = state.setdefault(name, {})
            more[STEPS] = torch.tensor(float(optimizer._steps))
            more[PENDING] = torch.tensor(float(slot.pending))
            if slot.pending:
                more["master"] = _master(slot)


def _master(slot: Slot) -> Tensor:
    """The parameter with the update that it has not seen; elements on the device are as they are."""
    from lowtide.optim.tensors import in_shape_of, sharded_like

    pieces = [
        part.master if part.master is not None else slot.values(part.start, part.stop)
        for part in slot.parts()
    ]
    if len(pieces) == 1:
        whole = pieces[0]
    else:
        whole = torch.cat(
            [piece.to("cpu", torch.promote_types(pieces[0].dtype, pieces[1].dtype)) for piece in pieces]
        )
    return sharded_like(in_shape_of(whole, local(slot.parameter)), slot.parameter)


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with tensors of its own, in main memory."""
    state = {
        name: {
            key: item.detach().to("cpu", copy=True) if isinstance(item, Tensor) else item
            for key, item in entries.items()
        }
        for name, entries in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def move(optimizer: PlacedOptimizer, host_fraction: float | Any) -> None:
    """Place all state anew, so that the host has ``host_fraction`` of it.

    Raises:
        OptimError: there is no room; everything is then where it was.
    """
    before, optimizer.host_fraction = optimizer.host_fraction, host_fraction
    if not optimizer._slots:
        return
    kept = copied(optimizer.state_dict())

    def anew() -> None:
        optimizer._forget(optimizer._slots.values())
        for slot in optimizer._slots.values():
            optimizer._stream.release(slot)
        optimizer._slots.clear()
        optimizer.state.clear()
        optimizer.load_state_dict(kept)

    try:
        anew()
    except OptimError:
        optimizer.host_fraction = before
        anew()
        raise


def load(optimizer: PlacedOptimizer, state_dict: dict[str, Any]) -> None:
    """Fill an optimizer from a state dict.

    Raises:
        OptimError: it does not fit; nothing has changed then.
    """
    state_dict = dict(state_dict)
    for hook in private.load_pre_hooks(optimizer):
        state_dict = hook(optimizer, state_dict) or state_dict
    before = optimizer.param_groups
    groups, saved = _match(optimizer, state_dict)
    optimizer.param_groups = groups
    try:
        for parameter, entries in saved.items():
            _check(optimizer, parameter, entries)
        optimizer._place(saved.keys())
        for parameter, entries in saved.items():
            _check_slot(optimizer, optimizer._slots.get(parameter), entries)
    except BaseException:
        optimizer.param_groups = before
        raise
    for old, new in zip(before, groups, strict=True):  # schedulers hold on to the groups themselves
        old.clear()
        old.update(new)
    optimizer.param_groups = before
    optimizer._whole = "loading a checkpoint was interrupted"
    optimizer.link.settle()
    optimizer._steps = 0
    optimizer.state.clear()
    for parameter, slot in optimizer._slots.items():
        _fill(optimizer, slot, saved.get(parameter, {}))
    for hook in private.load_post_hooks(optimizer):
        hook(optimizer)


def _match(
    optimizer: PlacedOptimizer, state_dict: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    """The saved groups with our parameters, and the saved state by parameter."""
    packed = state_dict["param_groups"]
    ours = [len(group["params"]) for group in optimizer.param_groups]
    theirs = [len(group["params"]) for group in packed]
    if ours != theirs:
        raise OptimError(
            f"the saved state has groups of {theirs} parameters, the optimizer of {ours}: build the "
            "optimizer as it was saved"
        )
    groups: list[dict[str, Any]] = []
    by_name: dict[Any, Tensor] = {}
    for mine, other in zip(optimizer.param_groups, packed, strict=True):
        by_name.update(zip(other["params"], mine["params"], strict=True))
        taken = {name: item for name, item in other.items() if name != "params" and name not in _OURS}
        groups.append({**mine, **taken, "params": mine["params"]})
    unknown = [name for name in state_dict["state"] if name not in by_name]
    if unknown:
        raise OptimError(f"the saved state is for a parameter {unknown[0]!r} that no saved group has")
    return groups, {by_name[name]: entries for name, entries in state_dict["state"].items() if entries}


def _check(optimizer: PlacedOptimizer, parameter: Tensor, entries: dict[str, Any]) -> None:
    group = optimizer._group_of(parameter)
    known = {
        "step",
        "master",
        PENDING,
        STEPS,
        *optimizer.kernel.names(group),
        *optimizer.kernel.scalars(group),
    }
    strange = sorted(set(entries) - known)
    if strange:
        raise OptimError(
            f"the saved state holds {', '.join(strange)}, which {optimizer.kind.__name__} does not keep"
        )
    shape = local(parameter).shape
    for name, item in entries.items():
        if isinstance(item, Tensor) and item.ndim and local(item).shape != shape:
            raise OptimError(
                f"the saved {name} of a parameter has shape {tuple(local(item).shape)} where this process "
                f"holds {tuple(shape)} of {tuple(parameter.shape)}: build the model as it was saved; sharded "
                "state is loaded through torch.distributed.checkpoint"
            )
        if is_sharded(parameter) and isinstance(item, Tensor) and is_sharded(item):
            saved, here = item.placements, parameter.placements  # type: ignore
            if saved != here:
                raise OptimError(f"the saved {name} is placed {saved}, its parameter {here}")


def _check_slot(optimizer: PlacedOptimizer, slot: Slot | None, entries: dict[str, Any]) -> None:
    pending = bool(entries.get(PENDING, False))
    assert slot is not None, "whatever has saved state was placed"
    names = set(optimizer.kernel.names(optimizer._group_of(slot.parameter)))
    if any(set(part.state) != names for part in slot.parts()):
        raise OptimError(
            f"the saved groups ask for {', '.join(sorted(names)) or 'no state'}: make the optimizer with the "
            "same options"
        )
    if pending and not (optimizer.delayed and slot.device is None):
        raise OptimError(
            "the state was saved while a delayed update was under way: load it with delayed=True and "
            "host_fraction=1, or call finish() before saving"
        )


def _fill(optimizer: PlacedOptimizer, slot: Slot, entries: dict[str, Any]) -> None:
    """Put saved state into a slot; what was not saved begins anew."""
    like, group = local(slot.parameter), optimizer._group_of(slot.parameter)
    optimizer._steps = max(optimizer._steps, int(entries.get(STEPS, 0)))
    slot.pending, slot.updated, slot.version = bool(entries.get(PENDING, False)), False, -1
    saved = {
        name: flat_gradient(local(item), like)
        for name, item in entries.items()
        if isinstance(item, Tensor) and item.ndim == like.ndim
    }
    if like.ndim == 0:
        saved = {
            name: local(item).reshape(1)
            for name, item in entries.items()
            if name in (*slot.parts()[0].state, "master")
        }
    for part in slot.parts():
        part.step.fill_(float(entries.get("step", 0.0)))
        part.scalars = copies_of(
            {name: entries[name] for name in optimizer.kernel.scalars(group) if name in entries}
        )
        kept = [*part.state, *optimizer.kernel.scalars(group)]
        part.fresh = bool(kept) and not any(name in saved or name in part.scalars for name in kept)
        for name, elements in part.state.items():
            elements.copy_(saved[name][part.start : part.stop]) if name in saved else elements.zero_()
        if part.master is not None and "master" in saved:
            part.master.copy_(saved["master"][part.start : part.stop])
            slot.wrote()
    slot.shown = False
    if entries:
        show_state(optimizer, slot)
