"""`checkpointing`: inside any forward, keep only what enters the region."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import PlanError
from lowtide.plan.plan import Plan
from lowtide.run.compiled import left_alone
from lowtide.run.direct import Director, IdleDirector, PlanDirector, RegionDirector
from lowtide.run.record import Recorder, unpack

RegionPolicy = str | Callable[[str], bool] | None


class RuleDirector(RegionDirector):
    """Gives up what the operations that a rule names wrote, and keeps the rest.

    Args:
        give_up: from an operation's qualified name (``aten.gelu.default``) to whether its results are given up.
    """

    def __init__(self, give_up: Callable[[str], bool]) -> None:
        self._give_up = give_up

    def wants(self, info: Any) -> bool:
        """As the rule says."""
        return bool(self._give_up(info.name))

    def decide(self, info: Any, writes: int) -> tuple[bool, tuple[bool, ...]]:
        """As the rule says."""
        return bool(self._give_up(info.name)), ()


def _director(policy: RegionPolicy) -> Director:
    if policy is None or policy == "full":
        return RegionDirector()
    if policy == "keep_all":
        return IdleDirector()
    if isinstance(policy, str):
        raise PlanError(
            f"checkpointing(policy={policy!r}): a scope has no step graph, so it takes 'full', 'keep_all', or a function from an operation's "
            "name to whether its results are given up; give the other policies to lowtide.limit_memory"
        )
    rule = getattr(policy, "gives_up", policy)
    if not callable(rule) or _takes_graph(rule):
        raise PlanError(f"checkpointing(policy={policy!r}): this policy needs a step graph; give it to lowtide.limit_memory")
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

    Nothing of the model's Python runs twice: recorded operations are replayed below autograd, with their random state, each once, and those
    that nobody needs are not. Regions nest (the inner one rules what lies in it) and may be conditional. A region that backward never
    reaches costs nothing. Without gradients the block does nothing.

    Args:
        policy: ``None`` or ``"full"`` gives everything up, ``"keep_all"`` nothing (to except a part of an outer region), and a function
            decides by operation name.
        check: compare a digest of every replayed tensor with the original's.

    Raises:
        PlanError: a policy that needs a step graph.
        ReplayError: in backward, when an operation did not reproduce or a source was overwritten.

    Source: OneFlow's checkpointing pass, which keeps a scope's inputs and orders the replay behind its first backward consumer.

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
    watcher = next((mode for mode in reversed(private.dispatch_modes()) if hasattr(mode, "region")), None)
    if watcher is not None:
        with watcher.region(director):  # type: ignore[attr-defined]
            yield
        return
    with Recorder(director, check=check).recording():
        yield


def small_executor(
    model: torch.nn.Module, plan: Plan | None = None
) -> tuple[tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]], Callable[[], Any]]:
    """An executor for a step of which nothing is known yet: every block of the model keeps only what enters it.

    Args:
        model: whose step it is.
        plan: one that steps like it have run under; then it keeps what that keeps, unless that moves values.

    Returns:
        Its pack and unpack, and a function that makes the context in which it records.
    """
    known = plan is not None and bool(plan.program) and not plan.moves
    recorder = Recorder(PlanDirector(plan) if plan is not None and known else RegionDirector())

    @contextmanager
    def active() -> Iterator[None]:
        with ExitStack() as stack:
            for block in [] if known else blocks_of(model):
                stack.callback(block.register_forward_pre_hook(lambda *_: recorder.boundary()).remove)
                stack.callback(block.register_forward_hook(lambda *_: recorder.boundary()).remove)
            stack.callback(recorder.close)
            stack.enter_context(recorder)
            stack.enter_context(left_alone(model))
            yield

    return (recorder.pack, unpack), active


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The outermost members of the model's lists of modules; its children where there are none."""
    found: list[torch.nn.Module] = []

    def search(module: torch.nn.Module) -> None:
        for child in module.children():
            if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(list(module.children())) > 1:
                found.append(child)
            else:
                search(child)

    search(model)
    return found or list(model.children())
