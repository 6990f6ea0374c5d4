"""`limit_memory`: a training step within a budget, for models that run eagerly and for those that
`torch.compile` made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lowtide import accelerator, private
from lowtide import budget as budgets
from lowtide.errors import BudgetError, PlanError, expect
from lowtide.extension import Extension
from lowtide.meter.resident import model_device
from lowtide.plan import POLICIES, check_seconds
from lowtide.plan.data import Plan
from lowtide.run.limit.checks import (
    Demand,
    check_arguments,
    check_given,
    refuse_several_devices,
)
from lowtide.run.limit.entry import Entry
from lowtide.run.limit.handle import Handle, handle_of
from lowtide.run.limit.limiter import Limiter
from lowtide.run.messages import is_wrapped, own_checkpointing
from lowtide.run.profile.profiler import load_ahead
from lowtide.run.record.special import Verify, check_verify

if TYPE_CHECKING:
    from lowtide.extensions.moves.store.stores import Stores

_BLOCKS_KEEP = (
    "blocks of this model are compiled, and the compiled engine cannot plan for them: {}. The rest of "
    "the model runs eagerly under the limit. All tensors that these blocks save are kept, so small "
    "budgets are refused"
)


def limit_memory(
    model: torch.nn.Module | Any,
    budget: str | int | None = None,
    *,
    policy: str | Callable[..., Plan] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    verify: Verify = "first",
    stores: Stores | None = None,
    progress: bool | None = None,
    reserved: bool | None = None,
    plan_seconds: float | None = None,
    plans: str | Path | None = None,
    tiles: Literal["auto"] | None = None,
    host_budget: str | int | None = None,
) -> Handle:
    """Make the training steps of ``model`` fit a budget, at the least extra time, with bitwise the same
    gradients.

    The first step is profiled while it runs. If the budget is given in bytes, this step is held to it, too.
    Each operation runs twice, to compare the results and to measure its time. After five equal runs at the
    same sizes an operation runs once. At the end of the first backward lowtide makes a plan, and later steps
    follow it. The plan of a larger step serves smaller ones. Steps in another mode, in autocast, in other
    dtypes or with other trainable parameters are profiled and get plans of their own. A second call for the
    same model replaces the limit.

    Args:
        model: any module. Its forward is replaced on the instance until ``handle.remove()``, and its own
            gradient checkpointing (transformers, diffusers, timm) is off until then. A model that
            `torch.compile` returned is compiled again within the budget, as by `lowtide.compile`; then only
            ``optimizer`` and ``plan_seconds`` are accepted. Or a schedule of
            ``torch.distributed.pipelining``, whose ``step`` is replaced: the budget then holds for all stages
            and microbatches of this rank. Every rank of the pipeline sets its own limit.
        budget: bytes, or text such as ``"600MiB"`` or ``"60%"`` of the plain step's peak (of the largest step
            planned so far, or of ``optimizer.step()`` if that takes more), ``"min"`` for the smallest budget
            that works, or ``"auto"`` for the device's free memory less a tenth. ``None`` needs a policy that
            works without a budget.
        progress: whether to show progress on a terminal; ``None`` depends on the environment
            (`lowtide.progress`).
        policy: a policy or its name. ``None`` is ``auto``: on a CPU that is ``optimal``, which keeps or
            recomputes; on CUDA it may move values to main memory, too (`lowtide.policies.auto`). It measures
            the link to main memory once in a process, in well under a second, when the first model on CUDA is
            limited.
        loss_fn: computes the loss from the model's output, for `Handle.prepare` of a model that does not
            return its loss. Training does not use it.
        optimizer: the budget also counts its state and its step.
        stores: process groups to shard over and codecs of your own, for plans that move values.
        reserved: on CUDA, whether the budget counts the memory that PyTorch's caching allocator reserves, and
            not only the bytes of tensors; for budgets in bytes and ``"auto"``. ``None`` is true for
            ``"auto"`` only.
        verify: ``first`` compares the results of an operation with those of its second run, in profiled
            steps; ``always`` also compares digests of recomputed tensors in every later step; ``never``
            compares nothing.
        plan_seconds: about how long a search for a plan may take, while a step waits for it. It counts work,
            not time. After a short search a plan may be further from the best one, and says so. ``None`` is
            0.7 seconds or ten plain steps, whichever is more, for ``optimal``; if other ranks wait, too, 0.05
            seconds or one plain step; other policies have limits of their own.
        plans: a folder in which lowtide keeps plans. A later process with the same model, versions and kind
            of device uses them from its first step on, and profiles nothing. With another budget it plans
            from the kept profile. Each rank has a file; either all ranks use their files, or none does. Give
            each limited model its own folder. The compiled engine keeps its plans in Inductor's cache, with
            or without a folder.
        tiles: with ``"auto"``, modules that treat each token alone (MLPs, norms) run in pieces of the tokens,
            as by `lowtide.tile`, if no plan fits otherwise. The gradients of their weights are then sums in
            another order. Each larger kind of step is first traced on fake tensors, which takes some seconds.
            The plan's notes say what is tiled, and what that costs.
        host_budget: the most that plans may move to main memory, in bytes or as ``"8GiB"``. ``None`` is a
            quarter of what is free there when the limit is set. It is page-locked when a plan first needs it,
            for all steps. For a model on CUDA, with the policies ``auto`` and ``mixed``.

    Returns:
        The handle; a `CompiledHandle` for a model that `torch.compile` returned.

    Raises:
        BudgetError: the budget is malformed; at the end of the first backward, no plan fits. The error has
            the smallest budget that works.
        PlanError: an argument has a wrong type, or does not work with the others.

    Example:
        >>> import torch, lowtide
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
        >>> handle = lowtide.limit_memory(model, budget="100%", loss_fn=torch.sum)
        >>> model(torch.randn(4, 8)).sum().backward()
        >>> handle.plan.predicted_peak_bytes <= handle.plan.budget_bytes
        True
        >>> handle.remove()
    """
    schedule = model if private.is_schedule(model) else None
    if schedule is not None:
        if loss_fn is not None:
            raise PlanError("loss_fn= does not go with a pipeline's schedule, which has one: leave it out")
        from lowtide.extensions.ranks.pipeline import module_of

        model = module_of(schedule)
    if not isinstance(model, torch.nn.Module):
        raise PlanError(
            f"limit_memory takes a torch.nn.Module, or a schedule of torch.distributed.pipelining, not "
            f"{type(model).__name__}"
        )
    check_verify(verify)
    check_given(budget, policy)
    check_seconds(plan_seconds, policy, "limit_memory(plan_seconds=)")
    default = policy is None or policy == "auto"
    check_arguments(None if default else policy, loss_fn)
    face = Face(reserved, default and schedule is None)
    keeping = [*face.keeping(plans), *face.tiling(tiles)]
    extensions = [] if optimizer is None else [face.counting(model, optimizer)]
    refuse_several_devices(model)
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    meaningless = {
        "policy": not default,
        "host_budget": host_budget is not None,
        "loss_fn": loss_fn is not None,
        "verify": verify != "first",
        "stores": stores is not None,
        "progress": progress is not None,
        "reserved": reserved is not None,
        "tiles": tiles is not None,
    }
    if private.is_compiled(model) and "_orig_mod" in model._modules:
        return _limit_compiled(
            model, budget, optimizer, plan_seconds, [name for name, given in meaningless.items() if given]
        )
    why_eager = None
    in_parts = any(private.is_compiled(block) for block in model.modules() if block is not model)
    if in_parts and schedule is None and budget is not None and not any(meaningless.values()):
        handle, why_eager = _limit_blocks(model, budget, optimizer, plan_seconds)
        if handle is not None:
            return handle
    # what that raises leaves the model as it is
    policy = face.deciding(model_device(model), policy, host_budget, schedule)
    extensions = [*face.moving(model, policy, stores), *extensions, *keeping]
    before = handle_of(model if schedule is None else schedule)
    if before is not None:
        before.remove()
    settings = {
        "budget": budget,
        "policy": policy,
        "progress": progress,
        "plan_seconds": plan_seconds,
    }
    given: Any = (model, loss_fn, verify, face, extensions)
    if schedule is not None:
        from lowtide.extensions.ranks.pipeline import PipelineLimiter

        return _begun(PipelineLimiter(schedule, *given, **settings))
    kind = Limiter
    if private.may_shard():
        from lowtide.extensions.ranks.ranks import refuse_first_fsdp
        from lowtide.extensions.ranks.sharded import ShardedLimiter

        refuse_first_fsdp(model)
        kind = ShardedLimiter  # it may be sharded after this
    limiter = kind(*given, **settings)
    handle = _begun(limiter)
    limiter.engagement.begin()
    load_ahead(model_device(model))
    if why_eager is not None:
        limiter.warn_once(why_eager)
    if any(map(is_wrapped, model.modules())):  # others show it in their first step
        limiter.warn_once(own_checkpointing(model))
    return handle


def _begun(limiter: Limiter) -> Handle:
    """The handle of a limit that is in force from now on."""
    limiter.extend(limiter.maker.budget)
    limiter.install()
    limiter.turn_off_checkpointing()
    return Handle(limiter)


def _limit_compiled(
    model: torch.nn.Module,
    budget: str | int | None,
    optimizer: torch.optim.Optimizer | None,
    plan_seconds: float | None,
    meaningless: list[str],
) -> Any:
    if meaningless or budget is None:
        raise PlanError(
            "this model is compiled: its limit takes a budget, optimizer= and plan_seconds=, and knows no "
            f"{' and no '.join(f'{name}=' for name in meaningless) or 'policy'}. Leave that out, or limit "
            "the model itself in place of what torch.compile returned"
        )
    from lowtide.compiled.api import limit_compiled  # importing Inductor takes seconds

    before = handle_of(model)
    if before is not None:
        before.remove()
    return limit_compiled(model, budget, optimizer=optimizer, plan_seconds=plan_seconds)


def _limit_blocks(
    model: torch.nn.Module,
    budget: str | int,
    optimizer: torch.optim.Optimizer | None,
    plan_seconds: float | None,
) -> tuple[Any, str | None]:
    """The compiled engine's handle for a model whose blocks are compiled, or ``None`` and why it has none."""
    from lowtide.compiled.api import limit_compiled_blocks  # importing Inductor takes seconds

    try:
        return limit_compiled_blocks(model, budget, optimizer=optimizer, plan_seconds=plan_seconds), None
    except PlanError as why:
        return None, _BLOCKS_KEEP.format(why)


class Face:
    """Composes limits: imports the extensions that they ask for.

    Args:
        reserved: as of `limit_memory`.
        by_device: whether the device decides about the policy, also once the model is on another one.
    """

    def __init__(self, reserved: bool | None, by_device: bool = False) -> None:
        self.reserved, self.by_device = reserved, by_device

    def counting(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Extension:
        """What counts an optimizer.

        Raises:
            PlanError: it is no optimizer of the model's parameters.
        """
        from lowtide.extensions.optimizer.counted import CountedOptimizer, check_optimizer

        check_optimizer(model, optimizer)
        return CountedOptimizer(optimizer)

    def deciding(
        self,
        device: torch.device,
        policy: str | Callable[..., Plan] | None,
        host_budget: str | int | None,
        schedule: Any = None,
    ) -> str | Callable[..., Plan]:
        """The policy of a limit: where none is given, the device decides. A pipeline moves nothing by itself.

        Args:
            device: of the model.
            policy, host_budget: as of `limit_memory`.
            schedule: of a pipeline.

        Raises:
            PlanError: ``host_budget`` does not go with the device or the policy.
        """
        if host_budget is not None and schedule is not None:
            raise PlanError("host_budget= does not go with a pipeline, which moves nothing: leave it out")
        if policy is None or policy == "auto":
            stays = schedule is not None or not accelerator.is_accelerator(device)
            if stays and host_budget is None:
                return "optimal"
        elif host_budget is None and not getattr(policy, "usual", False):
            return policy
        from lowtide.extensions.moves.auto import settled

        return settled(policy, host_budget, device)

    def moving(
        self, model: torch.nn.Module, policy: str | Callable[..., Plan] | None, stores: Stores | None
    ) -> list[Extension]:
        """What moves values, where the policy may ask for that.

        Raises:
            PlanError: ``stores`` is something else, or a tier or codec of the policy cannot be used.
        """
        stays = policy is None or (isinstance(policy, str) and POLICIES[policy] == POLICIES["optimal"])
        if stays and stores is None:
            return []
        from lowtide.extensions.moves.extension import moves_for

        return [moves_for(policy, stores, model_device(model))]

    def keeping(self, folder: str | Path | None) -> list[Extension]:
        """What keeps plans in a folder, if one is given.

        Raises:
            PlanError: it is no folder.
        """
        if folder is None:
            return []
        from lowtide.extensions.kept.kept import kept_in

        return [kept_in(folder)]

    def tiling(self, tiles: str | None) -> list[Extension]:
        """What chooses tiles, if it is asked for.

        Raises:
            PlanError: ``tiles`` is something else.
        """
        if tiles is None:
            return []
        expect(tiles == "auto", "limit_memory(tiles=)", tiles, '"auto", or None')
        from lowtide.extensions.tiles.chosen import Tiles

        return [Tiles()]

    def missing(self, limiter: Limiter, budget: str | int | None) -> list[Extension]:
        """The extensions that a limit needs by now, for this budget, and does not have."""
        has, found = {extension.name for extension in limiter.extensions}, list[Extension]()
        if self.by_device and "moves" not in has:  # it may be on a card by now
            limiter.maker.policy = policy = self.deciding(model_device(limiter.model), None, None)
            found += self.moving(limiter.model, policy, None)
        auto = self.reserved is None and budgets.asks_for(budget) == "auto"
        if (self.reserved or auto) and "reserved" not in has:
            from lowtide.extensions.reserved.reserved import Reserved

            found.append(Reserved(self.reserved))
        if private.may_shard() and "ranks" not in has:
            from lowtide.extensions.ranks.ranks import ranks_of

            found.append(ranks_of(limiter))
        return found

    def advise(
        self,
        error: BudgetError,
        entry: Entry,
        model: torch.nn.Module,
        state_bytes: int,
        demand: Demand | None,
    ) -> BudgetError:
        """The planner's refusal of a step in a user's words."""
        from lowtide.extensions.advice.refusal import in_words

        return in_words(error, entry, model, state_bytes, demand)

    def follow(self, limiter: Limiter) -> None:
        """Tell what to do about this limit when its device, a card, has no memory left."""
        from lowtide.extensions.advice.out_of_memory import out_of_memory

        out_of_memory().follow(limiter)

    def compiled(self, limiter: Limiter) -> Any:
        """What gives the steps of a limit that `torch.compile` is around to the compiled engine."""
        from lowtide.compiled.around import Delegate  # importing Inductor takes seconds

        stores = any(getattr(one, "own", True) is False for one in limiter.extensions)
        policy = limiter.maker.policy
        own = {"policy": policy != "optimal" and not getattr(policy, "usual", False), "stores": stores}
        own["host_budget"] = getattr(policy, "given", False)
        own["verify"], own["reserved"] = limiter.verify != "first", bool(self.reserved)
        own["tiles"] = any(one.name == "tiles" for one in limiter.extensions)
        return Delegate(limiter, [f"{name}=" for name, given in own.items() if given])
