"""`checkpointing` scopes: what they hold, what they replay and when, that they nest, branch and fail well,
and what a trace on fake tensors knows of them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from scoped_model import Log, N, Stack, backward, batch, grads, make
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide import PlanError, private
from lowtide.interception import interceptors


@pytest.mark.parametrize(
    "scoped", [lambda k: True, lambda k: k % 2 == 0, lambda k: False], ids=["all", "every other", "none"]
)
def test_conditional_scopes(same: Any, scoped: Any) -> None:
    plain, model = make(), make()
    plain.scoped = lambda k: False
    model.scoped = scoped
    assert all(map(same, grads(plain), grads(model)))


def test_a_scope_holds_only_what_enters() -> None:
    """Everything made inside is gone when the scope is left, but for what leaves it."""
    seen: list[Any] = []
    first, second = nn.Linear(N, N), nn.Linear(N, N)
    entered = batch().exp()
    with lowtide.checkpointing():
        h = first(entered)
        y = F.gelu(h)
        z = F.softmax(second(y), -1)
        seen += [weakref.ref(t.untyped_storage()) for t in (h, y, z)]
        out = z.exp()
        del h, y, z
    assert [r() is None for r in seen] == [True] * 3
    out.sum().backward()
    assert first.weight.grad is not None


def test_results_that_leave_a_scope_are_evicted_too() -> None:
    """exp saves its result, which is also what leaves: once the caller drops it, it is gone."""
    w = nn.Parameter(batch())
    with lowtide.checkpointing():
        y = (w * 2).exp()
    reference = weakref.ref(y.untyped_storage())
    loss = y.sum()
    del y
    assert reference() is None
    loss.backward()
    torch.testing.assert_close(w.grad, 2 * (2 * w.detach()).exp())


@pytest.mark.parametrize("inner", [None, "full", "keep_all"])
def test_nested_scopes(same: Any, inner: str | None) -> None:
    class Nested(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing():
                x = self.blocks[0](x)
                with lowtide.checkpointing(policy=inner):
                    x = self.blocks[1](x)
                    with lowtide.checkpointing():
                        x = x.exp().sin()
                x = self.blocks[2](x).tanh()
            return x.square().mean()

    class Flat(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[1](self.blocks[0](x)).exp().sin()
            return self.blocks[2](x).tanh().square().mean()

    torch.manual_seed(0)
    nested = Nested()
    flat = Flat()
    flat.load_state_dict(nested.state_dict())
    assert all(map(same, grads(flat), grads(nested)))


def test_keep_all_inside_a_scope_replays_nothing_of_it() -> None:
    w = nn.Parameter(batch())
    with lowtide.checkpointing():
        y = (w * 2).sin()
        with lowtide.checkpointing(policy="keep_all"):
            z = (y * y).cos().exp()
        loss = (z * z).tanh().sum()
    log = backward(loss)
    assert log.count("exp") == 0  # z is kept
    assert log.count("tanh") == 1 and log.count("sin") >= 1


def test_a_rule_function_decides_by_operation(same: Any) -> None:
    plain, model = make(), make()
    plain.scoped = lambda k: False
    asked: set[str] = set()

    def rule(name: str) -> bool:
        asked.add(name)
        return name == "aten.gelu.default"

    model.policy = rule
    assert all(map(same, grads(plain), grads(model)))
    assert {"aten.gelu.default", "aten.addmm.default"} <= asked
    torch.manual_seed(1)
    log = backward(model(batch()))
    assert log.count("gelu") == 3 and log.count("native_layer_norm") == 0 and log.count("addmm") == 0


@pytest.mark.parametrize("policy", ["optimal", "sqrt", "nonsense", 3])
def test_policies_that_need_a_graph_are_refused(policy: Any) -> None:
    with pytest.raises(PlanError, match="policy"), lowtide.checkpointing(policy=policy):
        pass
    with (
        pytest.raises(PlanError, match=r"graph|policy"),
        lowtide.checkpointing(policy=lowtide.policies.optimal()),
    ):
        pass


def test_without_gradients_a_scope_does_nothing() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        with context(), lowtide.checkpointing():
            assert interceptors() == []
            batch().exp()


def test_a_scope_without_a_backward_consumer_costs_nothing() -> None:
    w = nn.Parameter(batch())
    with lowtide.checkpointing():
        unused = (w.exp() * w).sin()
        used = w * 3
    log = backward((used * used).sum())
    assert log.count("exp") == 0 and log.count("sin") == 0
    assert unused.shape == w.shape


def test_batch_norm_in_a_scope_moves_once(same: Any) -> None:
    class Norm(Stack):
        def __init__(self) -> None:
            super().__init__(1)
            self.norm = nn.BatchNorm1d(N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(policy=self.policy):
                x = F.relu(self.norm(x.exp())).sin()
            return x.sum()

    models = []
    for policy in ("keep_all", "full"):
        torch.manual_seed(0)
        model = Norm()
        model.policy = policy
        for _ in range(3):
            torch.manual_seed(1)
            model(batch().requires_grad_()).backward()
        models.append(model)
    assert all(map(same, models[0].buffers(), models[1].buffers()))
    assert int(models[1].norm.num_batches_tracked) == 3


def test_replay_is_as_late_as_its_first_consumer() -> None:
    """The last block replays first, and each block only when backward has come to it."""
    layers = nn.ModuleList([nn.Linear(N, N, bias=False) for _ in range(3)])
    x = batch()
    for layer in layers:
        with lowtide.checkpointing():
            x = layer(x).sin().exp()
    names = [n for n in backward(x.sum()).names if n in ("sin", "exp", "cos", "mm")]
    # exp' needs exp (replays mm, sin, exp), sin' needs cos of the replayed product, then the products'
    # gradients
    assert names[:4] == ["mm", "sin", "exp", "cos"]
    assert names.count("exp") == 3 and names.count("sin") == 3
    first_of_second = names.index("sin", 4)
    # both gradients of the last block before the second's replay
    assert names[4:first_of_second].count("mm") >= 2


def test_every_operation_runs_again_at_most_once() -> None:
    model = make()
    torch.manual_seed(1)
    with Log() as forward:
        loss = model(batch())
    log = backward(loss)
    again, before = Counter(log.names), Counter(forward.names)
    for name in ("addmm", "gelu", "native_layer_norm"):
        assert again[name] <= before[name]
    assert again["gelu"] == 3 and again["native_layer_norm"] == 3


def test_operations_nobody_needs_are_not_replayed() -> None:
    """The down projection of each block makes what leaves the scope: nobody saved it, nobody replays it."""
    model = make()
    torch.manual_seed(1)
    log = backward(model(batch()))
    assert log.count("addmm") == 3  # the up projections only


def flops_of(step: Callable[[], torch.Tensor]) -> int:
    """FLOPs of a step's forward and backward, in its second run: scopes verify in the first, and dispatch
    modes see what is run for that up to PyTorch 2.12.
    """
    step().sum().backward()
    with FlopCounterMode(display=False) as counter:
        step().sum().backward()
    return counter.get_total_flops()


def test_fewer_flops_than_torch_checkpoint() -> None:
    """To the operation: torch.utils.checkpoint runs every projection again; a scope leaves out the last of
    each block.
    """
    model = make()
    x = batch()
    model.eval()

    def flops(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        return flops_of(lambda: run(x).square().mean())

    def plain(h: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            h = block(h)
        return h

    def rival(h: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return h

    def scoped(h: torch.Tensor) -> torch.Tensor:
        for block in model.blocks:
            with lowtide.checkpointing():
                h = block(h)
        return h

    product = 2 * 6 * N * 4 * N
    assert flops(rival) - flops(plain) in (3 * 2 * product, 3 * product)  # with or without its early stop
    assert flops(scoped) - flops(plain) == 3 * product


def test_early_stop_does_no_better() -> None:
    """Where the last saved tensor is not the last product's, torch's early stop has to run what a scope
    leaves out.
    """
    first, second, third = (nn.Linear(N, N, bias=False) for _ in range(3))

    def block(h: torch.Tensor) -> torch.Tensor:
        a = first(h).sin()
        side = second(a)  # its result is not saved by anything
        return (third(a).exp() + side).tanh() * 2

    def scoped() -> torch.Tensor:
        with lowtide.checkpointing():
            return block(batch().requires_grad_())

    plain = flops_of(lambda: block(batch().requires_grad_()))
    rival = flops_of(lambda: checkpoint(block, batch().requires_grad_(), use_reentrant=False))
    assert flops_of(scoped) - plain <= rival - plain


def test_in_a_scope_views_in_place_and_dropout(same: Any) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = F.dropout(x.exp(), 0.5).view(2, 3, N)
        z = y.transpose(0, 1).clone()
        z[0] *= 2
        z.sigmoid_()
        return (z * y.transpose(0, 1)).sum()

    found = []
    for policy in ("keep_all", "full"):
        torch.manual_seed(0)
        x = batch().requires_grad_()
        with lowtide.checkpointing(policy=policy):
            loss = function(x)
        loss.backward()
        found.append(x.grad)
    assert same(*found)


def test_scope_in_a_limited_model(same: Any) -> None:
    plain, model = make(), make()
    plain.scoped = lambda k: False
    model.scoped = lambda k: k == 1
    expected = grads(plain)
    handle = lowtide.limit_memory(model, "100%")
    for _ in range(3):
        assert all(map(same, expected, grads(model)))
    assert handle.plan is not None


def test_a_plan_honours_the_scopes_of_the_model() -> None:
    model = make()
    model.scoped = lambda k: k == 1
    handle = lowtide.limit_memory(model, policy="keep_all")
    model(batch()).backward()
    modules = {handle.graph.operations[i].module for i in handle.plan.replayed}
    assert modules and all(name.startswith("blocks.1") for name in modules)


@pytest.mark.parametrize("where", ["inside", "backward"])
def test_failures_in_a_scope_leave_nothing(where: str) -> None:
    w = nn.Parameter(batch())
    held: list[Any] = []
    with pytest.raises(ZeroDivisionError), lowtide.checkpointing():
        y = (w * 2).exp()
        held.append(weakref.ref(y.untyped_storage()))
        if where == "inside":
            del y
            raise ZeroDivisionError
        z = y.sin()
        z.register_hook(lambda g: 1 // 0)
        loss = (z * z).sum()
        del y, z
        loss.backward()
    assert interceptors() == []
    if where == "backward":
        del loss
    assert held[0]() is None
    (w * 2).exp().sum().backward()


def test_backward_inside_a_scope(same: Any) -> None:
    w = nn.Parameter(batch())
    with lowtide.checkpointing():
        ((w * 2).exp() * w).sum().backward()
    first = w.grad.clone()
    w.grad = None
    ((w * 2).exp() * w).sum().backward()
    assert same(first, w.grad)


def test_two_scopes_share_what_enters_both(same: Any) -> None:
    w = nn.Parameter(batch())
    found = []
    for policy in ("keep_all", "full"):
        w.grad = None
        h = w.exp()
        with lowtide.checkpointing(policy=policy):
            a = (h * h).sin()
        with lowtide.checkpointing(policy=policy):
            b = (h * a).cos()
        (a * b * h).sum().backward()
        found.append(w.grad.clone())
    assert same(*found)


def test_generator_loops_and_recursion(same: Any) -> None:
    """A scope entered by a function that calls itself."""

    def tree(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0:
            return x.sin()
        with lowtide.checkpointing():
            return tree(x.exp().tanh(), depth - 1) + tree(x.cos(), depth - 1)

    x = batch().requires_grad_()
    tree(x, 4).sum().backward()
    scoped = x.grad
    x.grad = None
    with lowtide.checkpointing(policy="keep_all"):
        pass

    def flat(x: torch.Tensor, depth: int) -> torch.Tensor:
        return x.sin() if depth == 0 else flat(x.exp().tanh(), depth - 1) + flat(x.cos(), depth - 1)

    flat(x, 4).sum().backward()
    assert same(scoped, x.grad)


def test_fake_tensors_without_a_trace_are_refused() -> None:
    with (
        private.fake_mode(),
        pytest.raises(PlanError, match="cannot record on fake tensors"),
        lowtide.checkpointing(),
    ):
        pass
    with private.fake_mode(), torch.no_grad(), lowtide.checkpointing():
        pass  # there is nothing to record


@pytest.mark.parametrize(
    ("policy", "forced"),
    [
        (None, {"aten.addmm.default", "aten.tanh.default"}),
        ("keep_all", set()),
        (["aten.tanh.default"], {"aten.tanh.default"}),
    ],
)
def test_a_fake_trace_knows_scopes_as_a_real_one_does(policy: Any, forced: set[str]) -> None:
    class Scoped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(N, N)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with lowtide.checkpointing(policy):
                x = F.gelu(self.layer(x)).tanh()
            return x.exp().sin().sum()

    def forced_in(graph: lowtide.StepGraph) -> set[str]:
        producers = (graph.values[saved.value].producer for saved in graph.saved if saved.forced)
        return {graph.operations[producer].name for producer in producers if producer is not None}

    model, x = Scoped(), torch.randn(4, N)
    assert forced_in(lowtide.trace(model, x, fake=True, costs=False)) == forced
    assert forced_in(lowtide.trace(model, x, costs=False)) == forced
