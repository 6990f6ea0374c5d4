"""`lowtide.compile`: the budget is held, predictions are what the meter reads, gradients are the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compiled_models import Model, gradients, real_peak
from torch import nn
from torch._inductor import config as inductor_config

import lowtide
from lowtide.private.inductor import BackendCompilerFailed


@pytest.mark.parametrize("budget", ["100%", "70%", "50%", "min"])
def test_aot_eager_holds_the_budget_and_its_gradients_are_bitwise_those_of_eager(budget: str) -> None:
    model, x = Model(), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    twin(x).backward()
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    compiled(x).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    handle = lowtide.handle_of(compiled)
    assert handle is not None and handle.plan is not None
    real = real_peak(compiled, model, x)
    assert abs(real - handle.predicted_peak_bytes) <= 16, "the loss and its gradient are outside the graph"
    if budget != "100%":
        assert 0.95 * handle.plan.budget_bytes <= real <= handle.plan.budget_bytes
        assert handle.plan.replayed


class Seen(Model):
    """Patches of a picture: Inductor lays the convolution's inputs out anew, and hands copies to backward."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.patches = nn.Conv2d(3, 32, 8, stride=8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.patches(x).flatten(2).transpose(1, 2))


class OddRows(Model):
    """65 rows of 48 numbers: where Inductor pads strides, it would pad these, but not on a CPU."""

    def __init__(self) -> None:
        super().__init__(layers=2, width=48)
        self.first = nn.Parameter(torch.zeros(1, 1, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first.expand(len(x), 1, 48), x], 1)
        return super().forward(nn.functional.layer_norm(x, (48,)))


class Narrow(Model):
    """Products in bfloat16, whose kernel on a CPU allocates while it runs."""

    def __init__(self) -> None:
        super().__init__(layers=1, width=128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_what_a_product_allocates_while_it_runs_counts_under_inductor() -> None:
    model, x = Narrow(), torch.randn(512, 128)
    compiled = lowtide.compile(model, "97%")
    compiled(x).backward()
    real = real_peak(compiled, model, x)
    handle = lowtide.handle_of(compiled)
    assert abs(real / handle.predicted_peak_bytes - 1) <= 0.002
    assert real <= handle.plan.budget_bytes


@pytest.mark.parametrize(
    ("kind", "shape"),
    [pytest.param(Seen, (2, 3, 128, 128), marks=pytest.mark.slow), (OddRows, (4, 64, 48))],
)
def test_inductor_holds_the_budget_as_predicted(kind: type[Model], shape: tuple[int, ...]) -> None:
    model, x = kind(), torch.randn(shape)
    twin = copy.deepcopy(model)
    twin(x).backward()
    compiled = lowtide.compile(model, "min")
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    assert handle is not None and handle.plan is not None
    for a, b in zip(gradients(model), gradients(twin), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    real = real_peak(compiled, model, x)
    assert abs(real / handle.predicted_peak_bytes - 1) <= 0.01
    assert real <= handle.plan.budget_bytes < handle.plain_peak_bytes


@pytest.mark.slow
def test_the_smallest_budget_under_inductor_is_that_of_single_calls() -> None:
    """Inductor by itself keeps a buffer for the next of its size, and needed 6 % more here."""
    least = []
    for backend in ("aot_eager", "inductor"):
        model, x = Model(layers=4, width=64), torch.randn(1024, 64)
        compiled = lowtide.compile(model, "min", backend=backend)
        compiled(x).backward()
        least.append(real_peak(compiled, model, x))
        assert least[-1] <= lowtide.handle_of(compiled).plan.budget_bytes
    assert least[1] <= 1.01 * least[0]


@pytest.mark.slow
def test_settings_of_the_user_come_first() -> None:
    model, x = Model(layers=3, width=64), torch.randn(1024, 64)
    compiled = lowtide.compile(model, "min", options={"allow_buffer_reuse": True})
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    assert abs(real_peak(compiled, model, x) / handle.predicted_peak_bytes - 1) <= 0.01


@pytest.mark.slow
@pytest.mark.parametrize("given", ["options", "process"])
def test_a_wrapper_in_cpp_holds_its_budget(given: str) -> None:
    """Inductor calls its kernels from C++ then, which nobody reads: what it takes is what Python would."""
    model, x = Model(layers=4, width=64), torch.randn(1024, 64)
    twin = copy.deepcopy(model)
    options = {"cpp_wrapper": True}
    with inductor_config.patch(options if given == "process" else {}):
        compiled = lowtide.compile(model, "min", options=options if given == "options" else {})
        compiled(x).backward()
        real, handle = real_peak(compiled, model, x), lowtide.handle_of(compiled)
        torch.compile(twin, options=options)(x).backward()
    assert abs(real / handle.predicted_peak_bytes - 1) <= 0.01 and real <= handle.plan.budget_bytes
    assert all(map(torch.equal, gradients(model), gradients(twin)))


def test_settings_given_beside_compile_options_are_predicted_with() -> None:
    """Buffers that wait for the next of their size take 5.1 MB at least, and 4.7 would do without."""
    options = {**lowtide.compile_options(4_900_000), "allow_buffer_reuse": True}
    compiled = torch.compile(Model(layers=3, width=64), options=options)
    with pytest.raises(Exception, match="BudgetError"):
        compiled(torch.randn(1024, 64))


class Gate(nn.Module):
    """Inductor writes a gate's gradient over one of the products that backward was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*size) for size in ((32, 128), (32, 128), (128, 32)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Gated(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(Gate() for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


@pytest.mark.slow
def test_saved_values_that_a_backward_writes_over_are_predicted() -> None:
    model, x = Gated(), torch.randn(512, 32)
    compiled = lowtide.compile(model, "85%")
    compiled(x).backward()
    real, handle = real_peak(compiled, model, x), lowtide.handle_of(compiled)
    assert handle is not None and abs(real - handle.predicted_peak_bytes) <= 16
    assert real <= handle.plan.budget_bytes


def test_dropout_is_bitwise_that_of_eager_at_every_budget() -> None:
    model, x = Model(dropout=0.3), torch.randn(512, 32)
    wanted = copy.deepcopy(model)
    torch.manual_seed(1)
    wanted(x).backward()
    for budget in ("100%", "min"):
        twin = copy.deepcopy(model)
        compiled = lowtide.compile(twin, budget, backend="aot_eager")
        torch.manual_seed(1)
        compiled(x).backward()
        assert all(torch.equal(a, b) for a, b in zip(gradients(twin), gradients(wanted), strict=True)), budget


def test_a_loss_that_lies_in_the_memory_of_its_terms_is_predicted() -> None:
    """ATen's mse_loss on a CPU returns one number in a storage of as many as it has averaged."""

    class Fitted(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return nn.functional.mse_loss(x, torch.zeros_like(x))

    model, x = Fitted(layers=2), torch.randn(1024, 32)
    compiled = lowtide.compile(model, "min", backend="aot_eager")
    compiled(x).backward()
    real, handle = real_peak(compiled, model, x), lowtide.handle_of(compiled)
    assert abs(real - handle.predicted_peak_bytes) <= 16
    assert real <= handle.plan.budget_bytes


def test_modules_have_their_names_whatever_forward_calls_its_argument() -> None:
    class Named(Model):
        def forward(s, x: torch.Tensor) -> torch.Tensor:
            return Model.forward(s, x)

    compiled = lowtide.compile(Named(), "min", backend="aot_eager")
    compiled(torch.randn(64, 32)).backward()
    handle = lowtide.handle_of(compiled)
    assert handle is not None and handle.plan is not None
    assert "budget min, 1 kind of steps planned" in repr(handle)
    assert "L[" not in str(handle.plan)


def test_batch_norm_moves_its_statistics_once() -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 64), nn.GELU())

    x = torch.randn(256, 16)
    model, twin = made(), made()
    twin(x).square().sum().backward()
    compiled = lowtide.compile(model, "min", backend="aot_eager")
    compiled(x).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert model[1].num_batches_tracked.item() == 1


@pytest.mark.parametrize("budget", ["100%", "min"])
def test_an_embedding_that_forward_rescales_is_looked_up_once(budget: str) -> None:
    """With ``max_norm`` the weight is overwritten when forward has ended, so no lookup runs again."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(50, 64, max_norm=1.0), nn.GELU(), nn.Linear(64, 64), nn.Tanh())

    words = torch.randint(0, 50, (16, 64))
    model, twin = made(), made()
    compiled = lowtide.compile(model, budget, backend="aot_eager")
    for _ in range(2):
        twin(words).square().sum().backward()
        compiled(words).square().sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert torch.equal(model[0].weight, twin[0].weight)


def test_tied_weights_get_one_gradient() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(64, 16)
            self.head = nn.Linear(16, 64, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(nn.functional.gelu(self.tokens(x))).logsumexp(-1).sum()

    model, x = Tied(), torch.randint(64, (256,))
    twin = copy.deepcopy(model)
    twin(x).backward()
    lowtide.compile(model, "min", backend="aot_eager")(x).backward()
    assert torch.equal(model.head.weight.grad, twin.head.weight.grad)


def within_what_is_told(compiled: Any, x: torch.Tensor, match: str) -> int:
    """The smallest budget that a refusal tells, within which a step then runs."""
    with pytest.raises(lowtide.BudgetError, match=match) as refused:
        compiled(x)
    lowtide.handle_of(compiled).set_budget(refused.value.smallest_bytes)
    compiled(x).backward()
    return refused.value.smallest_bytes


def test_a_budget_that_no_plan_meets_says_what_does() -> None:
    model, x = Model(), torch.randn(1024, 32)
    compiled = lowtide.compile(model, "100KiB", backend="aot_eager")
    smallest = within_what_is_told(compiled, x, "too small")
    assert real_peak(compiled, model, x) <= smallest


def test_a_budget_below_what_is_resident_is_refused_without_asking_inductor() -> None:
    model, x = Model(), torch.randn(1024, 32)
    compiled = lowtide.compile(model, "1KiB")
    smallest = within_what_is_told(compiled, x, "without Inductor: a smaller budget may work")
    assert lowtide.handle_of(compiled).plan.predicted_peak_bytes <= smallest


def test_another_budget_and_none() -> None:
    model, x = Model(), torch.randn(1024, 32)
    compiled = lowtide.compile(model, "100%", backend="aot_eager")
    compiled(x).backward()
    handle = lowtide.handle_of(compiled)
    whole = real_peak(compiled, model, x)
    handle.set_budget("60%")
    compiled(x).backward()
    assert real_peak(compiled, model, x) <= 0.6 * whole
    handle.remove()
    compiled(x).backward()
    assert real_peak(compiled, model, x) == whole
    assert lowtide.handle_of(compiled) is None


def test_a_limit_on_what_torch_compile_returned() -> None:
    model, x = Model(), torch.randn(1024, 32)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    compiled(x).backward()
    handle = lowtide.limit_memory(compiled, "60%")
    compiled(x).backward()
    took = real_peak(compiled, model, x)
    twin(x).backward()
    assert handle.plan is not None and handle.plan.replayed
    assert took <= handle.plan.budget_bytes
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(twin), strict=True))
    assert lowtide.handle_of(compiled) is handle
    assert lowtide.limit_memory(compiled, "100%") is lowtide.handle_of(compiled) is not handle


def test_the_optimizers_state_counts_before_it_is_there() -> None:
    model, x = Model(), torch.randn(1024, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    alone = lowtide.compile(copy.deepcopy(model), "100%", backend="aot_eager")
    alone(x).backward()
    compiled = lowtide.compile(model, "100%", backend="aot_eager", optimizer=optimizer)
    compiled(x).backward()
    more = lowtide.handle_of(compiled).predicted_peak_bytes - lowtide.handle_of(alone).predicted_peak_bytes
    state = 2 * sum(p.nbytes for p in model.parameters())
    assert state <= more <= state + 4 * len(list(model.parameters()))


def test_the_workspaces_of_cublas_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak() -> int:
        compiled = lowtide.compile(Model(), "100%", backend="aot_eager")
        compiled(torch.ones(64, 32)).backward()
        return lowtide.handle_of(compiled).predicted_peak_bytes

    without = peak()
    monkeypatch.setattr("lowtide.private.blas_workspace_bytes", lambda device: 1 << 20)
    assert peak() - without == 2 << 20  # forward's thread has one, and backward's


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"backend": "eager"}, "no backend 'eager'"),
        ({"backend": "aot_eager", "mode": "max-autotune"}, "drop them"),
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"optimizer": "adam"}, "not str"),
        ({"optimizer": torch.optim.SGD([torch.ones(1)])}, "holds none of this model's parameters"),
    ],
    ids=["backend", "mode", "cudagraphs", "no-optimizer", "another-models-optimizer"],
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(lowtide.PlanError, match=said):
        lowtide.compile(nn.Linear(2, 2), "60%", **wrong)


def test_cuda_graphs_are_refused_wherever_they_are_asked_for() -> None:
    """In the settings that are given, in those of the process, and beside `compile_options`."""
    with pytest.raises(lowtide.PlanError, match="CUDA graphs"):
        lowtide.compile(Model(), "60%", options={"triton.cudagraphs": True})
    with inductor_config.patch({"triton.cudagraphs": True}):
        with pytest.raises(lowtide.PlanError, match="CUDA graphs"):
            lowtide.compile(Model(), "60%")
        lowtide.compile(Model(), "60%", options={"triton.cudagraphs": False})
        lowtide.compile(Model(), "60%", backend="aot_eager")
        compiled = torch.compile(Model(), options=lowtide.compile_options("6GiB"))
        with pytest.raises(BackendCompilerFailed, match="CUDA graphs"):
            compiled(torch.ones(64, 32))


@pytest.mark.parametrize("before", ["lowtide.compile", "torch.compile", "in place", "limit_memory"])
def test_what_was_compiled_or_limited_is_compiled_anew(before: str) -> None:
    """As in a notebook, where a cell runs again."""
    model, x = Model(), torch.randn(1024, 32)
    given: Any = model
    if before == "lowtide.compile":
        given = lowtide.compile(model, "100%", backend="aot_eager")
    elif before == "torch.compile":
        given = torch.compile(model, backend="eager")
    elif before == "in place":
        model.compile(backend="eager")
    else:
        lowtide.limit_memory(model, "100%")
    given(x).backward()
    compiled = lowtide.compile(given, "60%", backend="aot_eager")
    compiled(x).backward()
    assert lowtide.handle_of(model) is None
    handle = lowtide.handle_of(compiled)
    assert handle.plan.replayed
    assert real_peak(compiled, model, x) <= handle.plan.budget_bytes


def test_a_refusal_says_what_outputs_beside_the_loss_take() -> None:
    """Autograd makes zeros for the gradient of each, and they stand until they are read: those of an early
    one through most of backward.
    """

    class Layers(nn.Module):
        def __init__(self, returns_first: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
            self.returns_first = returns_first

        def forward(self, x: torch.Tensor) -> Any:
            first = x = self.blocks[0](x)
            for block in self.blocks[1:]:
                x = block(x)
            return (x.square().mean(), first) if self.returns_first else x.square().mean()

    model, x = Layers(True), torch.randn(1024, 32)
    with pytest.raises(lowtide.BudgetError) as refused:
        lowtide.compile(model, "1KiB", backend="aot_eager")(x)
    with pytest.raises(lowtide.BudgetError, match="returns the loss alone"):
        lowtide.compile(model, refused.value.smallest_bytes - x.nbytes // 2, backend="aot_eager")(x)
    parts = refused.value.parts
    zeros = parts["zero gradients of outputs other than the loss"]
    assert 0 < zeros <= x.nbytes
    assert sum(parts.values()) == pytest.approx(refused.value.smallest_bytes, abs=1)
    with pytest.raises(lowtide.BudgetError) as alone:
        lowtide.compile(Layers(False), "1KiB", backend="aot_eager")(x)
    assert "zeros" not in str(alone.value)
    assert refused.value.smallest_bytes - alone.value.smallest_bytes >= zeros


def test_a_malformed_budget_is_refused_at_once() -> None:
    with pytest.raises(lowtide.BudgetError):
        lowtide.compile(nn.Linear(2, 2), "six")
    with pytest.raises(lowtide.BudgetError):
        lowtide.compile_options("six")


@pytest.mark.parametrize("codecs", ["int8", ("bfloat16", "int8")])
def test_codecs_are_refused_with_what_encodes_values(codecs: Any) -> None:
    with pytest.raises(lowtide.PlanError, match=r"policy=lowtide.policies.mixed\(.*'int8'\)") as refused:
        lowtide.compile(Model(), "60%", codecs=codecs)
    remedy = str(refused.value).partition("policy=")[2][:-1]
    assert callable(eval(remedy, {"lowtide": lowtide}))
