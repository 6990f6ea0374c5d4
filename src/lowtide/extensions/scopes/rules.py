"""Rules of a scope: which operations' results are evicted, without a step graph."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from lowtide import private
from lowtide.errors import PlanError, takes
from lowtide.interception import is_made_of_others
from lowtide.ops import op_info, operation_named
from lowtide.run.record.directors import ScopeDirector

Overload = private.OpOverload
Packet = private.OpOverloadPacket

Rule = Callable[[str], bool] | Callable[[Overload, tuple[Any, ...], dict[str, Any]], bool]
"""From an operation, before it runs, to whether its results are evicted.

It is called with the operation's name (``aten.gelu.default``) where it takes one argument, and with the
overload (``torch.ops.aten.gelu.default``), the arguments and the keyword arguments where it takes three. It
looks at tensors (their shapes, their types) and leaves them as they are.
"""

Operations = Collection[str | Overload | Packet]
"""Operations whose results are evicted: overloads, packets (all their overloads), or names of either."""

ScopePolicy = str | Rule | Operations | None


class RuleDirector(ScopeDirector):
    """Evicts what a rule says, and keeps the rest.

    Args:
        rule: takes an overload, arguments and keyword arguments; called once for each operation that is no
            view, in the order in which they run.
    """

    def __init__(self, rule: Callable[[Overload, tuple[Any, ...], dict[str, Any]], object]) -> None:
        super().__init__()
        self._rule = rule

    def evicts(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Ask the rule about the next operation."""
        info = op_info(func)
        if info.is_view or info.waits or not _makes_tensors(func) or private.in_backward():
            return False
        return bool(self._rule(func, args, kwargs))


@functools.cache
def _makes_tensors(func: Overload) -> bool:
    """Whether an operation returns tensors, and not a number."""
    return any("Tensor" in str(one.type) for one in private.schema_of(func).returns)


def director_for(policy: ScopePolicy) -> ScopeDirector:
    """The director of a scope with this policy.

    Raises:
        PlanError: it needs a step graph, is no rule, or names an operation that no scope sees.
    """
    if policy is None or (isinstance(policy, str) and policy == "full"):
        return ScopeDirector()
    if isinstance(policy, str):
        if policy == "keep_all":
            return ScopeDirector(evicted=False)
        raise PlanError(
            f"checkpointing(policy={policy!r}): a scope has no step graph, so it takes 'full', 'keep_all', a "
            "list of operations, or a function from an operation to whether its results are evicted; give "
            "the other policies to lowtide.limit_memory"
        )
    if isinstance(policy, Collection):
        return RuleDirector(_among(policy))
    if not callable(policy) or _takes_graph(policy):
        raise PlanError(
            f"checkpointing(policy={policy!r}): this policy needs a step graph; give it to "
            "lowtide.limit_memory"
        )
    if takes(policy, 1):
        return RuleDirector(lambda func, args, kwargs: policy(op_info(func).name))  # type: ignore[call-arg]
    if takes(policy, 3):
        return RuleDirector(policy)  # type: ignore[arg-type]
    raise PlanError(
        f"checkpointing(policy={policy!r}): a rule takes an operation's name, or the operation, its "
        "arguments and its keyword arguments"
    )


def _takes_graph(rule: Callable[..., object]) -> bool:
    """Whether a function is a policy, which is called with a step graph and a budget."""
    try:
        return "budget" in inspect.signature(rule).parameters
    except (TypeError, ValueError):
        return False


def _among(operations: Operations) -> Callable[[Overload, tuple[Any, ...], dict[str, Any]], bool]:
    """The rule that evicts a list of operations."""
    named = frozenset(_name_of(operation) for operation in operations)

    def evicts(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        name = op_info(func).name
        return name in named or name.rpartition(".")[0] in named

    return evicts


def _name_of(operation: object) -> str:
    """The name of an operation, or of a packet with an overload that a scope can see."""
    if not isinstance(operation, (str, Overload, Packet)):
        raise PlanError(
            f"checkpointing(policy=[{operation!r}]): a list names operations, as torch.ops.aten.gelu or "
            "'aten.gelu.default'"
        )
    found = operation_named(operation) if isinstance(operation, str) else operation
    if found is None:
        raise PlanError(
            f"checkpointing(policy=[{operation!r}]): there is no operation of that name; names are those of "
            "torch.ops, as in 'aten.gelu' or 'aten.gelu.default'"
        )
    names = [] if isinstance(found, Overload) else [o for o in found.overloads() if not o.endswith("out")]
    overloads = [getattr(found, name) for name in names] or [found]
    if all(op_info(one).is_view for one in overloads):
        raise PlanError(
            f"checkpointing(policy=[{operation!r}]): its results are views, which take no memory of their "
            "own; name the operation that wrote what they show"
        )
    if all(is_made_of_others(one.name()) for one in overloads):
        raise PlanError(
            f"checkpointing(policy=[{operation!r}]): it is made of other operations, and only those are "
            "seen (aten.mm and aten.addmm for a linear layer, say): name them"
        )
    return str(found)


def selective(context_fn: Callable[..., Any]) -> ScopeDirector:
    """A policy of PyTorch's selective checkpointing as a scope's director.

    Args:
        context_fn: ``functools.partial(create_selective_checkpoint_contexts, policy)``.

    Raises:
        PlanError: it is anything else.
    """
    given = context_fn if isinstance(context_fn, functools.partial) else None
    if (
        given is None
        or given.func is not create_selective_checkpoint_contexts
        or len(given.args) + len(given.keywords) != 1
        or not (given.args or "policy_fn_or_list" in given.keywords)
    ):
        raise PlanError(
            "lowtide.checkpoint(context_fn=...): nothing of the function runs a second time, so there is no "
            "second run to put into a context. Drop context_fn, or give "
            "functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, policy), or use "
            "lowtide.checkpointing(policy=...)"
        )
    policy = given.args[0] if given.args else given.keywords["policy_fn_or_list"]
    if isinstance(policy, Collection):
        kept = _among(policy)  # type: ignore[arg-type]
        return RuleDirector(lambda func, args, kwargs: not kept(func, args, kwargs))
    context = SelectiveCheckpointContext(is_recompute=False)

    def evicts(func: Overload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        answer = policy(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return not answer
        if answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            return False
        if answer in (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE):
            return True
        raise PlanError(
            f"lowtide.checkpoint: the policy answered {answer!r} for {func}, and a scope keeps or evicts: "
            "give 'mixed' or lowtide.policies.offload to lowtide.limit_memory"
        )

    return RuleDirector(evicts)
