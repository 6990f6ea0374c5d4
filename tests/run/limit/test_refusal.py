"""What lowtide refuses is one error, in a user's words, where it is given: arguments, models, budgets that no
plan meets; and what is said when CUDA runs out of memory. What the allocator says is given by hand here;
`tests/gpu` waits for the real one.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from small_model import batch, small
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import lowtide
from lowtide import BudgetError, LowtideWarning, PlanError, TraceError, private
from lowtide.extensions.advice.out_of_memory import OutOfMemory
from lowtide.extensions.advice.refusal import OPTIMIZER_TOO, OWN_OFF, in_words
from lowtide.extensions.ranks.agreement import on_rank
from lowtide.graph import StepGraph
from lowtide.remedies import PARAMETERS, RESIDENT, UPDATE, Holder
from lowtide.run.limit.checks import Demand
from lowtide.run.limit.entry import Entry, Facts, Kind
from lowtide.run.limit.key import StepKey


def chained(error: BaseException) -> bool:
    """Whether its traceback shows another one in front."""
    return error.__cause__ is not None or (error.__context__ is not None and not error.__suppress_context__)


@pytest.mark.parametrize("policy", [None, "full", "mixed"])
def test_a_refused_budget_is_one_error(policy: str | None) -> None:
    model = small()
    lowtide.limit_memory(model, "1KiB", policy=policy)
    with pytest.raises(BudgetError) as refused:
        model(batch()).backward()
    assert refused.value.smallest_bytes is not None and not chained(refused.value)
    inner = refused.value.__context__
    while inner is not None:
        assert inner.__traceback__ is None, "it would hold the planner's frames, and all that these hold"
        inner = inner.__context__


@pytest.mark.parametrize("loss_fn", [None, torch.sum])
def test_a_refused_budget_is_one_error_with_the_loss_outside(loss_fn: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    lowtide.limit_memory(model, "1KiB", loss_fn=loss_fn)
    with pytest.raises(BudgetError) as refused:
        model(torch.randn(50, 16)).sum().backward()
    assert not chained(refused.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (dict(policy="magic"), "there is no policy 'magic'"),
        (dict(policy=3), "there is no policy 3"),
        (dict(loss_fn=3), "loss_fn=3: give a function"),
        (dict(optimizer="adam"), "optimizer= takes a torch.optim.Optimizer .* not str"),
        (dict(optimizer=torch.optim.AdamW), "not AdamW, a class"),
        (dict(loss_fn=nn.functional.mse_loss), "loss_fn=mse_loss .* is given the model's output alone"),
        (
            dict(loss_fn=nn.CrossEntropyLoss()),
            "loss_fn=CrossEntropyLoss .* is given the model's output alone",
        ),
        (
            dict(optimizer=torch.optim.AdamW(nn.Linear(2, 2).parameters())),
            "AdamW that holds none of this model's parameters: give",
        ),
        (dict(stores={"tp": 4}), r"stores= takes lowtide.Stores\(...\), not dict"),
    ],
)
def test_an_argument_that_cannot_be_is_refused_at_once(given: dict[str, Any], says: str) -> None:
    model = small()
    with pytest.raises(PlanError, match=says):
        lowtide.limit_memory(model, "80%", **given)
    assert "forward" not in model.__dict__


def test_a_function_that_takes_two_arguments_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="output alone"):
        two: Any = lambda output, target: (output - target).sum()  # noqa: E731
        lowtide.limit_memory(small(), "80%", loss_fn=two)


@pytest.mark.parametrize(
    "loss_fn", [torch.sum, nn.Identity(), lambda output, scale=2.0: (output * scale).sum()]
)
def test_a_function_of_the_output_alone_is_taken(loss_fn: Any) -> None:
    lowtide.limit_memory(small(), "80%", loss_fn=loss_fn)


def test_an_optimizer_of_a_part_or_of_more_than_the_model_is_taken() -> None:
    model, other = small(), nn.Linear(2, 2)
    for held in (list(model.layers[0].parameters()), [*model.parameters(), *other.parameters()]):
        lowtide.limit_memory(model, "200%", optimizer=torch.optim.SGD(held)).remove()
    other.requires_grad_(False)
    lowtide.limit_memory(other, "200%", optimizer=torch.optim.SGD(model.parameters()))  # is not limited


def foreign() -> torch.Tensor:
    return torch.zeros(3, requires_grad=True).sum()


@pytest.mark.parametrize(
    "loss_fn",
    [lambda _: torch.zeros((), requires_grad=True), lambda output: output.detach().sum() + foreign()],
)
def test_a_loss_of_something_else_than_the_model_is_refused(loss_fn: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    handle = lowtide.limit_memory(model, "100%", loss_fn=loss_fn)
    with pytest.raises(TraceError, match="the loss does not depend on the model"):
        handle.prepare(torch.randn(50, 16))
    model(torch.randn(50, 16)).sum().backward()
    assert handle.plan is not None, "to train, the loss that the caller computes is the one"


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda output: output.sum() + foreign(),
        lambda output: output.mul_(2).sum(),  # written in place
        lambda output: torch.utils.checkpoint.checkpoint(torch.sum, output, use_reentrant=True),
    ],
)
def test_a_loss_that_reaches_the_model_by_any_way_is_taken(loss_fn: Any) -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    handle = lowtide.limit_memory(model, "200%", loss_fn=loss_fn)
    assert handle.prepare(torch.randn(50, 16)) is not None and handle.plan is not None


class Unused(nn.Module):
    """Has parameters that its forward does not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
        self.unused = nn.Linear(64, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x).square().mean()


def test_what_a_step_does_not_touch_is_named_as_what_it_is() -> None:
    model = Unused()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    gradient_bytes = sum(parameter.nbytes for parameter in model.used.parameters())
    handle = lowtide.limit_memory(model, "100MiB")
    model(batch(4, 64)).backward()
    handle.set_budget("1KiB")
    for resident in (0, gradient_bytes):  # the second step adds to resident gradients
        if not resident:
            model.zero_grad()
        with pytest.raises(BudgetError) as refused:
            model(batch(4, 64)).backward()
        assert refused.value.parts["parameters"] == parameter_bytes
        assert refused.value.parts["gradients"] >= resident
        assert "what else is resident" not in refused.value.parts


def test_a_model_without_parameters_to_train_says_that_it_is_not_limited() -> None:
    model = nn.Sequential(*(nn.GELU() for _ in range(3)))
    handle = lowtide.limit_memory(model, "60%", loss_fn=torch.sum)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(torch.randn(10, 10))
        assert not said, "nothing is kept there"
        for _ in range(2):
            model(torch.randn(10, 10, requires_grad=True)).sum().backward()
    assert [str(one.message).split(":")[0] for one in said] == [
        "no parameter of this limited model requires grad, so its steps are not planned"
    ]
    assert said[0].category is lowtide.LowtideWarning and said[0].filename == __file__ and handle.plan is None


def test_gradients_that_functorch_takes_in_the_forward_are_refused_in_words() -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda rows: self.layer(rows).square().sum())(x).square().mean()

    model = Inner()
    lowtide.limit_memory(model, "60%")
    with pytest.raises(lowtide.TraceError, match=r"torch\.autograd\.grad"):
        model(torch.randn(4, 8))


def test_a_refusal_names_what_holds_the_memory_and_its_line() -> None:
    """A loss of its own is live at the peak, as with a chunked one: what holds memory is the logits."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.body(x))
            tile = torch.empty(64)
            return logits.exp().sum() + tile.zero_().sum()

    lowtide.limit_memory(model := Model(), "64KiB")
    with pytest.raises(BudgetError) as refused:
        model(torch.randn(256, 8)).backward()
    lines = [line for line in refused.value.holders if "256x4096 float32" in line]
    assert lines and "test_refusal.py:" in lines[0] and "a batch half as large frees about" in lines[0]


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient * ctx.x


class KeepsOnItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Squared.apply(layer(x))
        return x.sum()


def test_what_a_function_keeps_on_its_own_has_its_remedy() -> None:
    lowtide.limit_memory(model := KeepsOnItsOwn(), "400KiB")
    with pytest.raises(BudgetError) as refused:
        model(torch.randn(512, 64)).backward()
    (line,) = [line for line in refused.value.holders if "an autograd.Function keeps on its own" in line]
    assert line.startswith("768 KiB of activations") and "test_refusal.py:" in line
    assert line.endswith("ctx.save_for_backward(x) in place of ctx.x = x frees about 640 KiB")


def on_two_devices(model: nn.Module) -> nn.DataParallel:
    """As `nn.DataParallel` is made where there are two GPUs."""
    parallel = nn.DataParallel(model)
    parallel.device_ids = [0, 1]
    return parallel


REPLICAS = "DataParallel copies the model .* DistributedDataParallel"


def test_data_parallel_is_refused_given_and_inside() -> None:
    for model in (on_two_devices(small()), nn.Sequential(on_two_devices(small()))):
        for limit in (lowtide.limit_memory, lambda m, b: lowtide.compile(m, b, backend="aot_eager")):
            with pytest.raises(PlanError, match=REPLICAS):
                limit(model, "80%")
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lowtide.limit_memory(model, "100%")
    model[0] = on_two_devices(model[0])
    with pytest.raises(PlanError, match=REPLICAS):
        model(torch.ones(2, 4))


def test_a_model_on_several_devices_is_refused() -> None:
    """When it is limited, and in the first step after it has been moved apart."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        apart = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for at, layer in enumerate(apart):
            layer.weight = nn.Parameter(torch.empty(4, 4, device=f"cuda:{at}"))
            layer.bias = None
        several = r"0\.weight on cuda:0, 1\.weight on cuda:1.*move the model to one of them.*fully_shard"
        for limit in (lowtide.limit_memory, lambda m, b: lowtide.compile(m, b, backend="aot_eager")):
            with pytest.raises(PlanError, match=several):
                limit(apart, "80%")
        with pytest.raises(lowtide.TraceError, match=r"tensors on cuda:0 and cuda:1.*model=model"):
            lowtide.trace(lambda: apart(torch.ones(2, 4)).sum())
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    lowtide.limit_memory(model, "100%")
    model[1] = apart[1]
    with pytest.raises(PlanError, match=r"0\.weight on cpu, 1\.weight on cuda:1"):
        model(torch.ones(2, 4))


def test_data_parallel_on_one_device_passes_through() -> None:
    model = nn.DataParallel(nn.Linear(4, 4))
    model.device_ids = [0]
    lowtide.limit_memory(model, "100%").remove()


@pytest.mark.parametrize("limited", ["eager", "compiled"])
def test_data_parallel_around_a_limited_model_is_refused(limited: str) -> None:
    inner = nn.Linear(4, 4)
    if limited == "compiled":
        inner = lowtide.compile(inner, "100%", backend="aot_eager")
    else:
        lowtide.limit_memory(inner, "100%")
    copied = copy.deepcopy(nn.Sequential(inner)) if limited == "eager" else nn.Sequential(inner)
    for module in copied.modules():  # as nn.DataParallel copies it
        if module is copied[0]:
            with pytest.raises(PlanError, match=REPLICAS):
                module._replicate_for_data_parallel()
        else:
            module._replicate_for_data_parallel()
    lowtide.handle_of(copied[0]).remove()
    assert isinstance(copied[0]._replicate_for_data_parallel(), nn.Module)


def test_a_step_in_a_cuda_graph_capture_is_refused_and_leaves_nothing(
    twins: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = twins(small(), budget="80%")
    pair.check(lambda model: model(batch()).sum())
    with monkeypatch.context() as capture:
        capture.setattr("lowtide.accelerator.is_capturing", lambda: True)
        with pytest.raises(PlanError, match=r"while a CUDA graph is captured.*handle\.remove\(\)"):
            pair.limited(batch())
        with pytest.raises(PlanError, match="CUDA graph"), lowtide.checkpointing():
            pass
        with torch.no_grad():
            pair.limited(batch())
    pair.check(lambda model: model(batch()).sum())


def test_what_has_no_caching_allocator_is_refused() -> None:
    with pytest.raises(PlanError, match=r"this model is on cpu: leave reserved out"):
        lowtide.limit_memory(torch.nn.Linear(2, 2), "1GiB", reserved=True)


# ---- a refused step -------------------------------------------------------------------------------


def refused(step_bytes: int, update_bytes: int | None) -> BudgetError:
    """The refusal of a step whose plans take so much, with an optimizer's own step that takes so much."""
    model = torch.nn.Linear(2, 2)
    parts = {PARAMETERS: 24, UPDATE: (update_bytes or 0) - 24}
    short = None
    if update_bytes is not None:
        made = [Holder(UPDATE, parts[UPDATE])]
        short = BudgetError(
            None, update_bytes, budget_bytes=100, parts=parts, subject="optimizer.step()", made=made
        )
    demand = Demand(StepGraph((), (), (), (), (), resident_bytes=1 << 30), 100, 0, 0, None, short)
    entry = Entry(StepKey(((64, 2),), (), "", 0, (), 0, 0, 1), Kind(), facts=Facts(checkpoints=1))
    planners = BudgetError(None, step_bytes, budget_bytes=100, parts={RESIDENT: step_bytes})
    return in_words(planners, entry, model, 0, demand)


def test_the_planners_facts_get_names_and_what_the_entry_knows() -> None:
    alone = refused(1000, None)
    assert alone.parts == {PARAMETERS: 24, RESIDENT: 976}, "what is resident has a name as far as that goes"
    assert alone.remedies[0] == OWN_OFF and OPTIMIZER_TOO not in alone.detail
    assert 1000 <= (alone.smallest_bytes or 0) < 1200


def test_the_budget_that_is_named_does_for_the_step_and_for_the_optimizers_own() -> None:
    of_step, of_optimizer = refused(5000, 2000), refused(1000, 9000)
    assert "optimizer.step()" not in str(of_step).splitlines()[0] and OPTIMIZER_TOO in of_step.detail
    assert "optimizer.step()" in str(of_optimizer) and of_optimizer.smallest_bytes == 9000
    assert of_optimizer.holders[0].endswith("of temporary copies of its update")


class Table(nn.Module):
    """Few parameters beside a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.register_buffer("table", torch.zeros(500, 1000))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.layer(x)).sum()


@pytest.mark.parametrize("compiled", [False, True])
def test_buffers_are_named_and_are_not_said_to_be_sharded(compiled: bool) -> None:
    model: Any = Table()
    limited = lowtide.compile(model, "1MiB", backend="aot_eager") if compiled else model
    if not compiled:
        lowtide.limit_memory(model, "1MiB")
    with pytest.raises(BudgetError) as error:
        limited(torch.randn(64, 16)).backward()
    assert error.value.holders[0] == "1.91 MiB of buffers, the largest 'table', 500x1000 float32"
    assert "make the buffers smaller" in str(error.value) and "FSDP2" not in str(error.value)


@pytest.mark.parametrize(("kind", "freed"), [(torch.optim.AdamW, "fused=True"), (torch.optim.Adafactor, "")])
def test_a_refusal_of_the_optimizers_own_step_names_what_holds_most(kind: Any, freed: str) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    lowtide.limit_memory(model, "1500KiB", optimizer=kind(model.parameters()))
    with pytest.raises(BudgetError, match=r"too small for optimizer\.step\(\)") as error:
        model(torch.randn(2, 256)).sum().backward()
    assert "1 MiB of parameters: sharding" in "\n".join(error.value.holders)
    assert len(error.value.holders) == 3 and freed in error.value.detail
    assert ("optimizer state: lowtide.optim.HostOptimizer" in str(error.value)) == bool(freed)
    assert "FSDP2" in error.value.remedies[-1]


@pytest.mark.parametrize("more", [-500, 200])
def test_a_rank_s_refusal_says_on_another_what_is_resident_there(more: int) -> None:
    theirs = BudgetError(
        None, 4000, budget_bytes=2000, parts={PARAMETERS: 1000, RESIDENT: 300, "inputs": 2700}
    )
    here = on_rank(theirs, more)
    assert (here.budget_bytes, here.smallest_bytes) == (2000 + more, 4000 + more)
    assert sum(here.parts.values()) == 4000 + more and min(here.parts.values()) > 0
    assert f"({4000 + more} bytes)" in str(here)


def test_an_error_without_facts_keeps_its_words() -> None:
    error = BudgetError("nothing is left", 5, "of it", budget_bytes=3, remedies=["give more"])
    entry = Entry(StepKey(((64, 2),), (), "", 0, (), 0, 0, 1), Kind())
    assert str(in_words(error, entry, torch.nn.Linear(2, 2), 0, None)).startswith("nothing is left\nWhat to")


# ---- out of memory ---------------------------------------------------------------------------------


def told(observer: OutOfMemory) -> list[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        observer.warn(0, 3 << 30)
    return [str(one.message) for one in shown if issubclass(one.category, LowtideWarning)]


def test_it_says_what_holds_most_and_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    attached = []
    monkeypatch.setattr(private, "on_cuda_out_of_memory", attached.append)
    observer, model = OutOfMemory(), small()
    handle = lowtide.limit_memory(model, "80%")
    limiter = model.__dict__["forward"]
    for _ in range(2):
        observer.follow(limiter)
    assert attached == [observer.warn], "PyTorch cannot take one away: attached once"
    assert told(observer) == [], "nothing is planned yet"
    model(batch()).backward()
    (text,) = told(observer)
    assert text.startswith("CUDA device 0 has no 3 GiB free. A model of this process is limited to ")
    assert text.count("\n  - ") == 3 and "frees about" in text
    handle.remove()
    assert told(observer) == []
    del limiter, handle, model
    assert told(observer) == []


def test_on_a_cpu_nobody_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "on_cuda_out_of_memory", lambda _: pytest.fail("there is no CUDA here"))
    model = small()
    lowtide.limit_memory(model, "80%")
    for _ in range(2):
        model(batch()).backward()
    assert not torch.cuda.is_initialized()


class Head(nn.Module):
    """Logits that are most of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2000, 16), nn.Linear(16, 2000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(self.table(x)), x)


def test_a_compiled_refusal_names_shape_and_line_as_an_eager_one() -> None:
    eager: Any = Head()
    lowtide.limit_memory(eager, "100KiB")
    lines = []
    for model in (eager, lowtide.compile(Head(), "100KiB", backend="aot_eager")):
        with pytest.raises(BudgetError) as error:
            model(torch.randint(0, 2000, (128,))).backward()
        (line,) = [one for one in error.value.holders if "logits and loss" in one]
        _, form, place = line.partition(": ")[0].split(", ")
        lines.append((form, place.rpartition("/")[2]))
    assert lines[0] == lines[1] and lines[0][0] == "128x2000 float32" and "test_refusal.py:" in lines[0][1]
