"""What a script's function returned, understood: a model with its arguments, or a step; and an optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide import private
from lowtide.run.profile.trace_step import find_modules, reached_by
from lowtide.steps.target import ScriptError

_FORMS = (
    "(model, args), (model, args, kwargs), or a function that runs forward and backward; an optimizer may "
    "follow"
)


@dataclass(frozen=True, eq=False)
class Given:
    """One step of a script.

    Attributes:
        model: the module that a limit would be put on.
        args, kwargs: of its call, where there is no ``step``.
        step: runs forward and backward of one step; ``None`` where calling the model is the forward.
        optimizer: counts against the budget; ``None`` where the script names none.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    step: Callable[[], Any] | None = None
    optimizer: torch.optim.Optimizer | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        leaves = private.tree_leaves((self.args, self.kwargs))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    @classmethod
    def of(cls, returned: Any, who: str) -> Given:
        """The step that a function returned.

        Args:
            returned: a model and its arguments, or a step, and perhaps an optimizer.
            who: the function, in words.

        Raises:
            ScriptError: it is something else.

        Example:
            >>> given = Given.of((nn.Linear(2, 1), torch.ones(3, 2)), "make_step")
            >>> given.model, len(given.args), given.kwargs
            (Linear(in_features=2, out_features=1, bias=True), 1, {})
        """
        if isinstance(returned, nn.Module):
            raise ScriptError(
                f"{who} returned a model alone: return its arguments, too, as in "
                "return model, (inputs, targets)"
            )
        first, *rest = returned if isinstance(returned, (tuple, list)) and returned else (returned,)
        optimizer = rest.pop() if rest and isinstance(rest[-1], torch.optim.Optimizer) else None
        if isinstance(first, nn.Module) and 1 <= len(rest) <= 2:
            args, kwargs = _arguments(*rest, who=who)
            return cls(first, args, kwargs, optimizer=optimizer)
        if callable(first) and not isinstance(first, (nn.Module, type)):
            return cls._of_step(first, rest, optimizer, who)
        raise ScriptError(f"{who} returned {_in_words(returned)}: return {_FORMS}")

    @classmethod
    def _of_step(
        cls,
        step: Callable[[], Any],
        rest: list[Any],
        optimizer: torch.optim.Optimizer | None,
        who: str,
    ) -> Given:
        if len(rest) > 1 or not all(isinstance(one, nn.Module) for one in rest):
            raise ScriptError(f"{who} returned a step and {_in_words(tuple(rest))}: return {_FORMS}")
        try:
            inspect.signature(step).bind()
        except TypeError as error:
            raise ScriptError(
                f"the step that {who} returned cannot be called without arguments ({error}): return a "
                "function that has them, or return (model, args)"
            ) from None
        except ValueError:  # it has no signature that Python knows
            pass
        reached = reached_by(step)
        model = rest[0] if rest else _trained(find_modules(step), who)
        held = {id(parameter) for parameter in model.parameters()}
        known = [
            one
            for one in dict.fromkeys(item for item in reached if isinstance(item, torch.optim.Optimizer))
            if any(id(p) in held for group in one.param_groups for p in group["params"])
        ]
        if optimizer is None and len(known) == 1:
            optimizer = known[0]
        return cls(model, step=step, optimizer=optimizer)


def _arguments(args: Any, kwargs: Any = None, *, who: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call's arguments: a mapping alone is keyword arguments, what is no list is the only one."""
    if kwargs is None and isinstance(args, Mapping):
        args, kwargs = (), args
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ScriptError(f"{who} returned {_in_words(kwargs)} as keyword arguments: return {_FORMS}")
    return (
        tuple(args) if isinstance(args, (tuple, list)) else (args,),
        {str(name): item for name, item in (kwargs or {}).items()},
    )


def _trained(modules: list[nn.Module], who: str) -> nn.Module:
    """The one of a step's modules that is trained.

    Raises:
        ScriptError: there is none, or there are several.
    """
    trained = [one for one in modules if any(p.requires_grad for p in one.parameters())]
    inner = {below for one in trained for below in one.modules() if below is not one}
    roots = [one for one in trained if one not in inner]
    if len(roots) != 1:
        names = ", ".join(type(root).__name__ for root in roots)
        found = f"trains several models ({names})" if roots else "names no model that is trained"
        raise ScriptError(
            f"the step that {who} returned {found}, and a limit is on one: return it beside the step, as in "
            "return step, model"
        )
    return roots[0]


def _in_words(returned: Any) -> str:
    """What was returned, by its type.

    >>> _in_words(None), _in_words((1, "a")), _in_words(torch.ones(2))
    ('None', '(int, str)', 'Tensor')
    """
    if isinstance(returned, (tuple, list)):
        return f"({', '.join(type(one).__name__ for one in returned)})"
    return "None" if returned is None else type(returned).__name__
