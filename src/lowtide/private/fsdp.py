"""FSDP2 (`torch.distributed.fsdp.fully_shard`): its units, the storages that it gathers weights into, and
which of its settings change a step.

Seen in PyTorch 2.11 to 2.13. Nothing is imported that the program has not imported.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_CALL = "_call_impl"


def is_unit(module: torch.nn.Module) -> bool:
    """Whether `fully_shard` was called for a module: its hooks gather and free the weights."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return hasattr(fsdp, "FSDPModule") and isinstance(module, fsdp.FSDPModule)


def is_root(module: torch.nn.Module) -> bool:
    """Whether a module is a unit that, so far as FSDP has seen, lies in no other unit: the hooks of such a
    unit begin and end a step.
    """
    return is_unit(module) and module._get_fsdp_state()._is_root is not False  # pyright: ignore


def is_first_fsdp(module: torch.nn.Module) -> bool:
    """Whether a module is of the first FSDP (``FullyShardedDataParallel``)."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", None)
    return kind is not None and isinstance(module, kind)


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether FSDP, the first or the second, shards a model or a part of it."""
    return any(is_unit(module) or is_first_fsdp(module) for module in model.modules())


def called_by(module: torch.nn.Module, call: Any) -> None:
    """Call ``call`` in the place of a module's own call, with hooks and all; ``None`` is PyTorch's own."""
    module.__dict__.pop(_CALL, None)
    if call is not None:
        module.__dict__[_CALL] = call


def own_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's call with all of its hooks, whatever `called_by` has put there."""
    return getattr(type(module), _CALL)(module, *args, **kwargs)


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that `fully_shard` was called for, the model itself among them."""
    return [module for module in model.modules() if is_unit(module)]


@contextmanager
def around_units(
    model: torch.nn.Module,
    begins: Callable[[int, Iterable[tuple[str, torch.Tensor]]], None],
    ended: Callable[[], None],
) -> Iterator[None]:
    """Within the block, call ``begins`` where the forward of a unit begins, when its weights have just been
    gathered, and ``ended`` after it. Methods that were given to `register_fsdp_forward_method` count as
    forwards: they pass by the module's hooks, and ask FSDP's state.

    Args:
        model: has the units.
        begins: is given a number of the unit, and what its weights are gathered into (`gathered`).
        ended: takes no arguments.
    """

    def begins_with(state: Any) -> Callable[..., None]:
        return lambda *_: begins(id(state), _gathered_by([state]))

    with ExitStack() as stack:
        for unit in units(model):  # behind its own hook, which gathers
            state = unit._get_fsdp_state()  # pyright: ignore
            stack.callback(unit.register_forward_pre_hook(begins_with(state)).remove)
            stack.callback(unit.register_forward_hook(lambda *_: ended()).remove)
        for state in _states(model):
            for name, call in (("_pre_forward", begins_with(state)), ("_post_forward", ended)):
                state.__dict__[name] = _followed_by(getattr(state, name), call)
                stack.callback(state.__dict__.pop, name)
        yield


def _followed_by(method: Callable[..., Any], call: Callable[[], None]) -> Callable[..., Any]:
    def both(*args: Any) -> Any:
        found = method(*args)
        call()
        return found

    return both


def _states(model: torch.nn.Module) -> list[Any]:
    """FSDP's states, each once: several modules may share one."""
    found = [module._get_fsdp_state() for module in units(model)]  # pyright: ignore
    return list(dict.fromkeys(found))


def _groups_of(state: Any) -> list[Any]:
    """The groups of parameters of one state; PyTorch 2.11 has at most one."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _groups(states: Iterable[Any]) -> Iterator[Any]:
    """FSDP's groups of parameters of some states."""
    for state in states:
        yield from _groups_of(state)


def gathered(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the weights of a model are gathered into, so far as they were made, with the name of a
    parameter of each. Their storages stay, and have bytes only while a unit is whole.
    """
    yield from _gathered_by(_states(model))


def _gathered_by(states: Iterable[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for group in _groups(states):
        for parameter in group.fsdp_params:
            name = getattr(parameter, "_param_fqn", None) or ""
            inner = getattr(parameter, "_unsharded_inner_tensors", ())
            for tensor in (*parameter.all_gather_outputs, *inner):
                yield name, tensor


def gather_once(model: torch.nn.Module) -> None:
    """Where FSDP shards a model, gather the weights of each of its units once, and free them again. What they
    are gathered into is made then, and not within the next step. A collective for each unit.
    """
    if is_root(model):
        model._get_fsdp_state()._lazy_init()  # pyright: ignore
        for unit in units(model):
            unit.unshard()  # pyright: ignore
            unit.reshard()  # pyright: ignore


def weight_in(storage: torch.UntypedStorage) -> str:
    """The name of a parameter that some model of this process gathers into a storage, else the empty string.
    Looks through all objects of the process: for errors.
    """
    module: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param")
    kind = getattr(module, "FSDPParam", None)
    for parameter in (one for one in gc.get_objects() if kind is not None and type(one) is kind):
        inner = getattr(parameter, "_unsharded_inner_tensors", ())
        if any(t.untyped_storage()._cdata == storage._cdata for t in (*parameter.all_gather_outputs, *inner)):
            return getattr(parameter, "_param_fqn", None) or ""
    return ""


def unsharded_gradients(model: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    """Of each parameter the gradient that waits whole for a later step to reduce it, where there is one
    (``set_requires_gradient_sync(False)``): no parameter of the model has it in its ``grad``.
    """
    yield from _waiting(_states(model))


def _waiting(states: Iterable[Any]) -> Iterator[torch.Tensor | None]:
    for group in _groups(states):
        for parameter in group.fsdp_params:
            waiting = getattr(parameter, "unsharded_accumulated_grad", None)
            whole = getattr(parameter, "_unsharded_param", None)
            yield waiting if waiting is not None or whole is None else whole.grad


def settings(model: torch.nn.Module) -> tuple[Any, ...]:
    """What changes a step and may be set between two: which gradients are reduced, whether weights are freed,
    what is gathered ahead, and which gradients wait whole.
    """
    found: list[Any] = []
    states = _states(model)
    places = {id(state): place for place, state in enumerate(states)}  # the same in every process
    for state in states:
        found.append(state._state_ctx.is_last_backward)
        for ahead in (state._states_to_forward_prefetch, state._states_to_backward_prefetch):
            found.append(tuple(places.get(id(other)) for other in ahead))
        # the first step notes so that the root's weights stay
        stays = model in state._modules and getattr(state, "_auto_reshard_after_forward", False)
        for group in _groups_of(state):
            found += [
                group.reduce_grads,
                group.all_reduce_grads,
                group.reshard_after_backward,
                bool(stays) or group.post_forward_mesh_info is None,
                group._sharded_state.name,
                group.unshard_async_op,
                getattr(group, "unshard_in_backward", True),
                group._partial_reduce_output is not None,
            ]
    found += [gradient is not None for gradient in _waiting(states)]
    return tuple(found)


def process_groups(model: torch.nn.Module) -> list[Any]:
    """The process groups that the model's weights are gathered over, and those that add up its gradients."""
    found: dict[int, Any] = {}
    for group in _groups(_states(model)):
        for name in ("shard_process_group", "replicate_process_group"):
            process_group = getattr(group.mesh_info, name, None)
            if process_group is not None:
                found[id(process_group)] = process_group
    return list(found.values())
