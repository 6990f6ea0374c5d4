"""``lowtide plan``: the plan of one training step, without running it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from lowtide import budget as budgets
from lowtide.errors import BudgetError
from lowtide.estimate.devices import DEVICES, Device
from lowtide.estimate.devices import device as find_device
from lowtide.estimate.fitted import fitted
from lowtide.estimate.simulation.pricing import pricer
from lowtide.estimate.suggest import RESERVE
from lowtide.extensions.moves.simulate import sources_of
from lowtide.graph import StepGraph
from lowtide.limits import Face
from lowtide.models import build_model
from lowtide.models.build import untouched
from lowtide.plan import Plan, check_seconds, make, within_seconds
from lowtide.plan.data import Link, in_one_line
from lowtide.plan.policies.build import Policy
from lowtide.plan.reserved_bytes import reserved_either_way
from lowtide.plan.simulate.holders import planned_holders
from lowtide.progress import Work, working
from lowtide.remedies import in_lines
from lowtide.run.transforms import with_overhead
from lowtide.trace.costs.timing import measure_costs
from lowtide.trace.fake import CostBySignature, Specs, trace_fake
from lowtide.train.arrangements import check_compile
from lowtide.train.options import (
    DTYPES,
    check_device,
    check_file,
    check_host_budget,
    check_policy,
    check_tiles,
    require,
)
from lowtide.train.part import raised_note
from lowtide.train.settings import checked_spec

TIMED_BYTES = 2 << 30
"""Operations on more than this are estimated instead of timed: they would take minutes, and memory that the
step itself may not have.
"""


_NO_HOST = "--host-budget says how much of it a plan may take there"


@dataclass(frozen=True)
class PlanOptions:
    """A step to plan; the attributes mean what they mean in `lowtide.train.settings.Settings`.

    Attributes:
        device: ``cpu``, ``cuda``, ``cuda:N``, or an accelerator that need not be there
            (`lowtide.estimate.devices`): the step is traced on the CPU, and operations take what they would
            there.
        dtype: by default ``fp32``, and ``bf16`` for an accelerator that need not be there.
    """

    model: str = "gpt-small"
    budget: str | None = "60%"
    raise_budget: bool = False
    policy: str | None = None
    host_budget: str | None = None
    tiles: Literal["auto"] | None = None
    plan_seconds: float | None = None
    batch: int = 8
    seq: int = 256
    dtype: Literal["fp32", "bf16"] | None = None
    device: str = "cpu"
    dropout: float | None = None
    unfused_attention: bool = False
    loss_chunks: int | None = None
    compile: bool = False
    compile_backend: str | None = None
    json: Path | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "seq"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1 is needed")
        require(self.precision in DTYPES, "dtype", self.dtype, f"choose {' or '.join(DTYPES)}")
        if self.budget is not None:
            budgets.check(self.budget)  # not only after a minute of tracing
        check_policy(self.policy)
        check_seconds(self.plan_seconds, self.policy, "--plan-seconds")
        check_file("json", self.json)
        check_host_budget(self.host_budget, self.policy, self.device, compiled=self.compile)
        check_tiles(self.tiles, self.budget, self.compile)
        check_compile(self.compile, self.compile_backend, self.policy, self.device, self.loss_chunks)
        priced = self.device.lower() in DEVICES
        require(
            not (self.compile and priced),
            "compile",
            "",
            f"--compile for --device {self.device} needs such a device: leave one out",
        )
        require(
            not self.compile or self.budget is not None,
            "compile",
            "",
            "it needs a budget: pass --budget, 100% for all",
        )
        if not priced:
            check_device(self.device, f", or a card to price it for ({', '.join(DEVICES)})")
        else:
            require(
                self.precision == "bf16",
                "dtype",
                self.dtype,
                f"--device {self.device} is priced by its bfloat16 products: pass --dtype bf16, or none",
            )

    @property
    def precision(self) -> str:
        """The dtype, where none was given, too."""
        return self.dtype or ("bf16" if self.device.lower() in DEVICES else "fp32")


def make_plan(options: PlanOptions) -> Plan:
    """The plan of the step, traced on fake tensors. On a CPU this takes little memory whatever the model's
    size.

    Raises:
        LowtideError: the options do not fit the model, or no plan meets the budget.
    """
    return compiled_plan(options) if options.compile else trace_and_plan(options)[1]


def compiled_plan(options: PlanOptions) -> Plan:
    """The plan of the compiled step: graphs as the backend would get them, no kernel compiled.

    Raises:
        LowtideError: the options do not fit the model, it does not compile as one graph, or no plan meets the
            budget.
    """
    from lowtide.compiled.planning import forecast  # takes seconds, which other plans do without

    device = torch.device(options.device)
    tokens = torch.zeros(options.batch, options.seq, dtype=torch.long, device=device)
    backend = options.compile_backend or "inductor"

    def within(budget: str | int) -> Plan:
        with torch.autocast(device.type, DTYPES[options.precision], enabled=options.precision != "fp32"):
            inputs, seconds = (tokens, tokens.clone()), options.plan_seconds
            return forecast(model, budget, *inputs, backend=backend, plan_seconds=seconds)

    assert options.budget is not None  # checked with the options
    with working("planning", "planned") as work:
        model = _model(options, device)
        work.say("tracing and planning one compiled step")
        try:
            made = within(options.budget)
        except BudgetError as error:
            if not options.raise_budget or error.smallest_bytes is None:
                raise
            made = within(error.smallest_bytes)
            made = replace(made, notes=(*made.notes, raised_note(options.budget, error)))
        how = f"compiled by {backend}: what it would allocate is predicted, no kernel was compiled"
        made = replace(made, notes=(*made.notes, how, no_optimizer(model)))
        work.done(in_one_line(made))
    return made


def trace_and_plan(options: PlanOptions) -> tuple[StepGraph, Plan]:
    """The step, traced on fake tensors, and its plan.

    Raises:
        LowtideError: the options do not fit the model, or no plan meets the budget.
    """
    with working("planning", "planned") as work:
        graph, made = _trace_and_plan(options, work)
        work.done(in_one_line(made))
    return graph, made


def _trace_and_plan(options: PlanOptions, work: Work) -> tuple[StepGraph, Plan]:
    """As `trace_and_plan`."""
    card = find_device(options.device) if options.device.lower() in DEVICES else None
    device = torch.device(options.device if card is None else "cpu")
    model = _model(options, device)
    tokens = torch.zeros(options.batch, options.seq, dtype=torch.long, device=device)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device.type, DTYPES[options.precision], enabled=options.precision != "fp32"):
            return model(tokens, targets).loss

    work.say("tracing one step")
    inputs, kind, costs = (tokens, tokens.clone()), device.type, costs_on(card)

    def traced() -> StepGraph:
        graph = trace_fake(step, inputs, {}, [model], kind, costs, model.buffers())
        if card is None:
            return with_overhead(graph)
        return replace(graph, resident_bytes=graph.resident_bytes + card.workspaces_bytes)

    policy = policy_on(card, options.policy, options.host_budget, device)
    tiled = ()
    if card is not None:
        options = replace(options, budget=budget_on(card, options.budget, adamw_bytes(model)))
    if options.tiles is None:
        graph = traced()
    else:
        from lowtide.extensions.tiles.search import tiled_for

        graph, tiled = tiled_for(model, traced, policy, options.budget or "min")
    made = _plan_within(graph, options, policy)
    made = replace(made, notes=(*made.notes, *tiled, *([] if card is None else [price_note(card)])))
    notes = (most_held(graph, made, card), *reserve_note(graph, made, card), no_optimizer(model))
    made = replace(made, notes=(*made.notes, *notes))
    return graph, made


def _model(options: PlanOptions, device: torch.device) -> nn.Module:
    """The model, without its weights' bytes."""
    spec = checked_spec(
        options.model, options.seq, options.dropout, options.unfused_attention, options.loss_chunks
    )
    return untouched(lambda: build_model(spec), device)


def costs_on(card: Device | None) -> Callable[[Specs], CostBySignature]:
    """What says what operations cost: a clock here, or the prices of a card."""
    if card is None:
        return partial(measure_costs, memory_limit_bytes=TIMED_BYTES)
    price = pricer(card)
    return lambda specs: {key: price(specs[key]) for key in specs}


def budget_on(card: Device, budget: str | None, state_bytes: int) -> str | None:
    """The budget, where ``auto`` is what the card has for PyTorch, less an optimizer's state that no plan
    counts.
    """
    if budgets.asks_for(budget) != "auto":
        return budget
    return f"{int(card.memory_bytes * (1 - RESERVE) / (1 + fitted()['reserved']['plain'])) - state_bytes} B"


def price_note(card: Device) -> str:
    workspaces = budgets.format_bytes(card.workspaces_bytes)
    return (
        f"traced on this machine's CPU kernels; seconds are the {card.name}'s at the efficiencies of "
        f"published runs (docs/estimate.md). cuBLAS's workspaces, {workspaces}, are counted; what other "
        "kernels allocate while they run is not"
    )


def most_held(graph: StepGraph, plan: Plan, card: Device | None = None) -> str:
    """What holds most at the plan's peak, and what would free how much of it; workspaces are no tensors."""
    if card is not None:
        graph = replace(graph, resident_bytes=graph.resident_bytes - card.workspaces_bytes)
    return "at the peak stand " + "; ".join(in_lines(planned_holders(graph, plan, sources_of=sources_of)))


def reserve_note(graph: StepGraph, plan: Plan, card: Device | None) -> list[str]:
    """What PyTorch's allocator takes for the plan's steps, where the device is a CUDA card."""
    if plan.moves or not (graph.device.startswith("cuda") or card is not None):
        return []
    workspaces = () if card is None else (card.workspaces_bytes // 2,) * 2  # one a thread
    return [budgets.would_reserve(*reserved_either_way(graph, plan.stored, workspaces))]


def no_optimizer(model: nn.Module) -> str:
    """What is told of a plan that counts no optimizer."""
    state = budgets.format_bytes(adamw_bytes(model))
    return f"the plan counts no optimizer: AdamW's state takes {state} more"


def adamw_bytes(model: nn.Module) -> int:
    """Bytes of AdamW's state for a model."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return sum(2 * parameter.numel() * parameter.element_size() for parameter in trained)


def policy_on(
    card: Device | None, policy: str | None, host_budget: str | None, device: torch.device
) -> str | Policy:
    """The policy of a plan, as a limit on the device has it. On a card that is not here, values move over the
    link of its data sheet, to as much main memory as ``host_budget`` says.

    Raises:
        OptionError: ``host_budget`` is for a policy that cannot be planned for such a card.
        PlanError: it does not go with the device, or the policy.
    """
    if card is None:
        return Face(None).deciding(device, policy, host_budget)
    require(
        host_budget is None or policy != "mixed",
        "host-budget",
        host_budget,
        f"mixed measures codecs, for which a {card.name} has to be here: pass --policy auto",
    )
    if policy not in (None, "auto"):
        return policy
    from lowtide.extensions.moves.auto import Auto, auto

    if host_budget is None:
        return Auto(why_not=_NO_HOST)
    return auto(links={"host": Link(card.host_bandwidth, card.host_bandwidth)}, host_budget=host_budget)


def _plan_within(graph: StepGraph, options: PlanOptions, policy: str | Policy) -> Plan:
    """The plan within the budget, or within the smallest that works where the budget may be raised."""
    policy = within_seconds(policy, options.plan_seconds, graph.device)
    try:
        return make(graph, budget=options.budget, policy=policy)
    except BudgetError as error:
        if not options.raise_budget or error.smallest_bytes is None:
            raise
        plan = make(graph, budget=budgets.with_slack(error.smallest_bytes), policy=policy)
        return replace(plan, notes=(*plan.notes, raised_note(options.budget, error)))
