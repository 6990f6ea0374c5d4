"""`checkpointing`: inside any forward, keep only what enters the region."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.run.direct import Director, IdleDirector, RegionDirector
from lowtide.run.record import Recorder

Rule = Callable[[str], bool] | Callable[[str, tuple[Any, ...], dict[str, Any]], bool]
"""From an operation's qualified name (``aten.gelu.default``), and if it takes them its arguments, to whether
its results are evicted.
"""

RegionPolicy = str | Rule | Collection[str] | None


class RuleDirector(RegionDirector):
    """Evicts what the operations that a rule names wrote, and keeps the rest. The rule is asked once for each
    operation.

    Args:
        rule: see `Rule`.
    """

    def __init__(self, rule: Callable[..., bool]) -> None:
        self._rule = rule
        self._sees_arguments = _takes(rule) >= 3
        self._answer = False

    def arrives(self, info: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """The next operation: ask the rule, and say what it answers."""
        self._answer = bool(
            self._rule(info.name, args, kwargs) if self._sees_arguments else self._rule(info.name)
        )
        return self._answer

    def wants(self, info: Any) -> bool:
        """As the rule said."""
        return self._answer

    def decide(self, info: Any, writes: int) -> tuple[bool, tuple[bool, ...]]:
        """As the rule said."""
        return self._answer, ()


def _takes(rule: Callable[..., object]) -> int:
    """How many arguments a rule can be called with."""
    try:
        parameters = inspect.signature(rule).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(1 for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _director(policy: RegionPolicy) -> Director:
    if policy is None or policy == "full":
        return RegionDirector()
    if policy == "keep_all":
        return IdleDirector()
    if isinstance(policy, str):
        raise PlanError(
            f"checkpointing(policy={policy!r}): a scope has no step graph, so it takes 'full', 'keep_all', "
            "or a function from an operation's name to whether its results are given up; give the other "
            "policies to lowtide.limit_memory"
        )
    if isinstance(policy, Collection):
        names = frozenset(policy)
        unknown = sorted(name for name in names if not isinstance(name, str) or name.count(".") < 1)
        if unknown:
            raise PlanError(
                f"checkpointing(policy={unknown}): a list names operations, as in ['aten.gelu.default', "
                "'aten.mm.default']"
            )
        return RuleDirector(names.__contains__)
    rule = getattr(policy, "gives_up", policy)
    if not callable(rule) or _takes_graph(rule):
        raise PlanError(
            f"checkpointing(policy={policy!r}): this policy needs a step graph; give it to "
            "lowtide.limit_memory"
        )
    return RuleDirector(rule)  # pyright: ignore


def _takes_graph(rule: Callable[..., object]) -> bool:
    """Whether a function is a policy, which is called with a step graph and a budget."""
    try:
        return "budget" in inspect.signature(rule).parameters
    except (TypeError, ValueError):
        return False


@contextmanager
def checkpointing(policy: RegionPolicy = None, *, check: bool = True) -> Iterator[None]:
    """Keep only what enters the block; recompute the rest when backward first needs it.

    Nothing of the model's Python runs twice: recorded operations are replayed below autograd, with their
    random state, each once, and those that nobody needs are not. Regions nest (the inner one rules what lies
    in it) and may be conditional. A region that backward never reaches costs nothing. Without gradients the
    block does nothing.

    Args:
        policy: ``None`` or ``"full"`` evicts everything, ``"keep_all"`` nothing (to except a part of an outer
            region). A list names the operations whose results are evicted, and a function decides by an
            operation's name (or name, arguments and keyword arguments).
        check: compare a digest of every replayed tensor with the original's.

    Raises:
        PlanError: a policy that needs a step graph, or a fake tensor mode that is active without a trace of
            lowtide's.
        ReplayError: in backward, when an operation did not reproduce or a source was overwritten.

    Source: OneFlow's checkpointing pass, which keeps a scope's inputs and orders the replay behind its first
        backward consumer.

    Example:
        >>> import torch, lowtide
        >>> layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
        >>> with lowtide.checkpointing():
        ...     y = torch.nn.functional.gelu(layer(x))
        >>> y.sum().backward()
    """
    director = _director(policy)
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        yield
        return
    watcher = next((one for one in reversed(private.watchers()) if hasattr(one, "region")), None)
    if watcher is not None:
        with watcher.region(director):
            yield
        return
    if private.is_fake_mode_active():
        raise PlanError(
            "checkpointing() cannot record on fake tensors: trace the step with lowtide.trace(..., fake=True)"
        )
    with Recorder(director, check=check).recording():
        yield


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost members of the model's lists of modules; its children where there are none."""
    found: list[torch.nn.Module] = []

    def search(module: torch.nn.Module) -> None:
        for child in module.children():
            if (
                isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential))
                and len(list(module.children())) > 1
            ):
                found.append(child)
            else:
                search(child)

    search(model)
    blocks = found or list(model.children())
    # which take no hooks from here
    return [block for block in blocks if not isinstance(block, torch.jit.ScriptModule)]
