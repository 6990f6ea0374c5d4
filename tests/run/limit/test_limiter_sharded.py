"""One limit on the root of a model that FSDP2 shards, whatever FSDP2 is asked for beside it: losses and
gradients bit by bit, as many gathers as without a limit, and what is predicted is what is measured.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from sharded_step_models import Adapted, Block, ByMethod, Model, Scoped, batch, local, sharded, watched
from torch import Tensor, nn

import lowtide
from lowtide import policies
from lowtide.graph import StepGraph
from lowtide.plan import Plan
from lowtide.plan.bound import A_SECOND, Effort
from lowtide.run.limit import planning

pytestmark = on_each_backend

STEPS = 3


# ---- ways to train -------------------------------------------------------------------------------

Train = Callable[[Any, torch.optim.Optimizer], list[Tensor]]


def gradients(model: nn.Module) -> list[Tensor]:
    return [local(p.grad).clone() for p in model.parameters() if p.grad is not None]


def steps(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Losses and gradients of a few steps."""
    found: list[Tensor] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(number))
        loss.backward()
        found += [loss.detach().clone(), *gradients(model)]
        optimizer.step()
    return found


def set_in_turn(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """What may be set between two steps, one after the other."""
    found = steps(model, optimizer)
    for name, argument in (
        ("set_reshard_after_forward", False),
        ("set_unshard_in_backward", True),
        ("set_modules_to_forward_prefetch", [model.blocks[0]]),
        ("set_reshard_after_forward", True),
        ("set_reduce_scatter_unused_params", True),
        ("set_reduce_scatter_max_input_buffers", 2),
    ):
        if hasattr(model, name):  # not in every version
            getattr(model, name)(argument)
            found += steps(model, optimizer)
    return found


def accumulated(model: Any, optimizer: torch.optim.Optimizer, reshards: bool = True) -> list[Tensor]:
    """Gradients are reduced after every third micro-batch; without ``reshards`` weights stay until then."""
    found: list[Tensor] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            if not reshards:
                model.set_is_last_backward(part == 2)
                model.set_reshard_after_backward(part == 2)
            loss = model(batch(3 * number + part))
            loss.backward()
            found.append(loss.detach().clone())
        found += gradients(model)
        optimizer.step()
    return found


def weights_stay(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Weights stay gathered across the optimizer's steps, so FSDP2 goes on with old ones: so it is without a
    limit.
    """
    model.set_reshard_after_backward(False)
    return steps(model, optimizer)


def evaluated(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A forward without gradients within each step, and evaluation between them."""
    found: list[Tensor] = []
    for number in range(STEPS):
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(number)).clone())
        model(batch(number)).backward()
        found += gradients(model)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(model(batch(50 + number)).clone())
        model.train()
    return found


def in_backward(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Each parameter has an optimizer, which runs when its gradient is there; no gradient stays."""
    found: list[Tensor] = []
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def update(parameter: Tensor) -> None:
        found.append(local(parameter.grad).clone())
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for number in range(STEPS):
        loss = model(batch(number))
        loss.backward()
        found.append(loss.detach().clone())
    return found


def saved_beside(model: Any, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """A checkpoint is written while the next step runs, in a process group of its own."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    group, under_way, found = dist.new_group(backend="gloo"), None, list[Tensor]()
    folders: Any = [TemporaryDirectory() if dist.get_rank() == 0 else None for _ in range(STEPS)]
    for number in range(STEPS):
        found += steps(model, optimizer)
        names = [folders[number].name if folders[number] else None]
        dist.broadcast_object_list(names)
        state = get_model_state_dict(model)
        kept = {name: local(item).clone() for name, item in state.items()}
        if under_way is not None:
            under_way.result()
        under_way = dcp.async_save(state, checkpoint_id=names[0], process_group=group)
        found += steps(model, optimizer)
        under_way.result()
        dcp.load(state, checkpoint_id=names[0], process_group=group)
        assert all(torch.equal(local(item), kept[name]) for name, item in state.items())
        if number == 0:
            break
    return found


# ---- what FSDP2 is asked for ---------------------------------------------------------------------


def mixed_precision() -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return sharded(Model(), mp_policy=policy)


def offloaded() -> Any:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return sharded(Model(), offload_policy=CPUOffloadPolicy(pin_memory=False))


def prefetching() -> Any:
    model = sharded(Model())
    for one, other in zip(model.blocks, model.blocks[1:], strict=False):
        one.set_modules_to_forward_prefetch([other])
        other.set_modules_to_backward_prefetch([one])
    return model


def grouped() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    fully_shard([model.norm, model.head])
    return sharded(model)


def nested() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for block in model.blocks:
        fully_shard(block.mlp)
    return sharded(model)


def blocks_alone() -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Model()
    for block in model.blocks:
        fully_shard(block)
    return model


def tied() -> Any:
    model = Model()
    model.head.weight = model.tokens.weight
    return sharded(model)


def from_meta() -> Any:
    with torch.device("meta"):
        model = Model()
    sharded(model).to_empty(device=torch.get_default_device())
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(local(parameter), 0, 0.02)
    return model


def other_dimension() -> Any:
    from torch.distributed.tensor import Shard

    return sharded(Model(), shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))


def hybrid(reshard: bool | int = True) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    half = dist.get_world_size() // 2
    mesh = init_device_mesh(torch.get_default_device().type, (2, half), mesh_dim_names=("replicate", "shard"))
    return sharded(Model(), mesh=mesh, reshard_after_forward=reshard)


def by_method() -> Any:
    from torch.distributed.fsdp import register_fsdp_forward_method

    def register(block: Any) -> None:
        block.__class__.mixed = Block.forward
        register_fsdp_forward_method(block, "mixed")

    return sharded(ByMethod(), each=register)


def divided() -> Any:
    model = sharded(Model())
    for name, argument in (
        ("set_gradient_divide_factor", 3.0),
        ("set_reduce_scatter_divide_factor", 3.0),
        ("set_force_sum_reduction_for_comms", True),
    ):
        if hasattr(model, name):
            for unit in (*model.blocks, model):
                getattr(unit, name)(argument)
    return model


Case = tuple[Callable[[], Any], Train]
FAST: dict[str, Case] = {
    "evaluation": (lambda: sharded(Model()), evaluated),
    "weights resharded to one rank": (lambda: sharded(Model(), reshard_after_forward=1), steps),
    "a registered forward method": (by_method, steps),
    "weights stay gathered": (lambda: sharded(Model()), weights_stay),
    "gradients divided": (divided, steps),
    "scopes inside": (lambda: sharded(Model(Scoped)), steps),
    "optimizer in backward": (lambda: sharded(Model()), in_backward),
}
SLOW: dict[str, Case] = {
    "settings between steps": (lambda: sharded(Model()), set_in_turn),
    "a checkpoint beside steps": (lambda: sharded(Model()), saved_beside),
    "mixed precision": (mixed_precision, steps),
    "CPU offload": (offloaded, steps),
    "micro-batches": (lambda: sharded(Model()), accumulated),
    "micro-batches, weights stay": (lambda: sharded(Model()), partial(accumulated, reshards=False)),
    "prefetching": (prefetching, steps),
    "groups": (grouped, steps),
    "nested units": (nested, steps),
    "blocks alone": (blocks_alone, steps),
    "blocks alone, evaluation": (blocks_alone, evaluated),
    "tied": (tied, steps),
    "LoRA": (lambda: sharded(Model(Adapted)), steps),
    "meta": (from_meta, steps),
    "blocks run twice": (lambda: sharded(Model(repeats=2)), steps),
    "another dimension": (other_dimension, steps),
    "HSDP": (hybrid, steps),
}


def compared(names: list[str], budgets: tuple[str, ...]) -> None:
    """Each case without a limit and within budgets."""
    for name in names:
        build, train = {**FAST, **SLOW, **ON_FOUR}[name]
        with watched() as gathers:
            plain = build()
            expected = train(plain, torch.optim.AdamW(plain.parameters()))
            asked = gathers[0]
            for budget in budgets:
                model = build()
                optimizer = torch.optim.AdamW(model.parameters())
                handle = lowtide.limit_memory(model, budget, optimizer=optimizer, progress=False)
                gathers[0] = 0
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message=".*from which lowtide plans, took")
                    warnings.filterwarnings("ignore", message=".*int.*instead of reshard_after_forward")
                    found = train(model, optimizer)
                told = f"{name}, {budget}"
                assert len(found) == len(expected) and all(map(torch.equal, found, expected)), (
                    told,
                    "differs",
                )
                assert gathers[0] == asked, (told, gathers[0], asked)
                plan, measured = handle.plan, handle.measured_peak_bytes
                assert plan is not None and plan.budget_bytes is not None and measured is not None, told
                assert plan.replayed, (told, "nothing runs again")
                assert measured <= plan.budget_bytes, (told, measured, plan.budget_bytes)
                off = measured - plan.predicted_peak_bytes
                if (
                    name != "optimizer in backward"
                ):  # its first step makes the state, and later ones take less
                    off = abs(off)
                assert off <= 0.01 * measured, (told, measured, plan.predicted_peak_bytes)
                handle.remove()


ON_FOUR: dict[str, Case] = {
    "HSDP of two by two": (hybrid, steps),
    "HSDP resharded to fewer": (partial(hybrid, 1), steps),
    "weights resharded to half the ranks": (lambda: sharded(Model(), reshard_after_forward=2), steps),
}


def refused() -> None:
    """A unit that is resharded in the middle of its backward."""
    model = sharded(Model())
    lowtide.limit_memory(model, policy="full")
    model(batch(0)).backward()
    model.blocks[1].mlp[2].register_full_backward_pre_hook(lambda *_: model.blocks[1].reshard())
    with pytest.raises(lowtide.ReplayError, match=r"'blocks\.1\.[a-z0-9.]+', which is not gathered now"):
        model(batch(1)).backward()


def refused_by_pytorch() -> None:
    """A weight that two units share: FSDP2 says so in a step, with a limit as without."""
    from torch.distributed.fsdp import fully_shard

    def said(limits: bool) -> str:
        model: Any = Model()
        model.head.weight = model.tokens.weight
        for part in (model.tokens, model.head, model):
            fully_shard(part)
        if limits:
            lowtide.limit_memory(model, "90%")
        with pytest.raises(Exception) as caught:
            model(batch(0)).backward()
        return f"{caught.type.__name__}: {caught.value}"

    assert said(True) == said(False)


def by_any_method() -> None:
    """The same step, whether units are called or their registered method is."""
    least: list[int] = []
    for build in (lambda: sharded(Model()), by_method):
        model = build()
        handle = lowtide.limit_memory(model, "min", optimizer=torch.optim.AdamW(model.parameters()))
        model(batch(0)).backward()
        assert handle.plan is not None
        least.append(handle.plan.predicted_peak_bytes)
    assert least[0] == least[1], least


def automatic() -> None:
    """Each rank has what its device has: they hold one plan."""
    model = sharded(Model())
    handle = lowtide.limit_memory(model, "auto", optimizer=torch.optim.AdamW(model.parameters()))
    model(batch(0)).backward()
    plan = handle.plan
    assert plan is not None and plan.budget_bytes is not None and plan.changes_nothing
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, (plan.stored, plan.predicted_peak_bytes))
    assert plans[0] == plans[1]


class Long(nn.Module):
    """Many small operations, among which a search for the least memory takes seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full((32, 32), 0.02)) for _ in range(96))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + torch.tanh(torch.sin(x @ weight))
        return x.square().mean()


def searched() -> None:
    """Others wait in the first step's backward: a search there does as much work as a step would take time
    for, whatever it searches for.
    """
    spent, own = list[float](), Effort.note

    def noted(effort: Effort, operations: float) -> None:
        spent.append(operations)
        own(effort, operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Effort, "note", noted)
        for budget, policy in product(("70%", "min"), (policies.optimal(), policies.mixed())):
            spent.clear()
            model = nn.parallel.DistributedDataParallel(Long())
            handle = lowtide.limit_memory(model, budget, policy=policy, progress=False)
            model(torch.ones(64, 32)).backward()
            (entry,) = handle._limiter.book.known.values()
            planned, graph = entry.planned, handle.graph
            assert planned is not None and graph is not None
            # a step's time, and plans that need no search
            allowed = max(planning._LEAST_SECONDS, graph.plain_seconds) * A_SECOND
            allowed += 60 * len(graph.operations)
            assert sum(spent) <= 2 * allowed, (budget, policy, sum(spent) / allowed)


def resting_on_the_root() -> None:
    """What enters the first block comes back by the weights of the root, which stay gathered meanwhile."""

    def recomputing_what_enters(graph: StepGraph, budget: int | None = None) -> Plan:
        made = {w for op in graph.operations if op.name == "aten.embedding.default" for w in op.writes}
        return policies.make_plan(graph, stored={value.id for value in graph.values} - made)

    with watched():
        model = sharded(Model())
        handle = lowtide.limit_memory(model, policy=recomputing_what_enters, progress=False)
        for number in range(2):
            model.zero_grad()
            model(batch(number)).backward()
        plan, measured = handle.plan, handle.measured_peak_bytes
        assert plan is not None and len(plan.replayed) == 1 and measured is not None
        assert abs(measured - plan.predicted_peak_bytes) <= 0.01 * measured


def several(*bodies: Callable[..., None]) -> None:
    """One after the other, in the same processes."""
    for body in bodies:
        body()


def test_what_fsdp_is_asked_for() -> None:
    on_ranks(
        2,
        several,
        partial(compared, list(FAST), ("min",)),
        refused,
        refused_by_pytorch,
        by_any_method,
        automatic,
        searched,
        resting_on_the_root,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_everything_that_fsdp_is_asked_for(name: str) -> None:
    share = "90%" if name == "LoRA" else "70%"  # little of it is recomputed
    on_ranks(2, compared, [name], (share, "min"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ON_FOUR))
def test_on_four_ranks(name: str) -> None:
    on_ranks(4, compared, [name], ("70%", "min"))
