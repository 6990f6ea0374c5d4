"""`lowtide.tile`: the gradients of the whole module, two forwards, and only what enters is kept."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_model import needs_meter
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import lowtide
from lowtide.run.messages import LowtideWarning

WIDTH, INNER = 32, 128

pytestmark = pytest.mark.filterwarnings("ignore::lowtide.run.messages.LowtideWarning")


class MLP(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER, bias=False)
        self.down, self.dropout = nn.Linear(INNER, WIDTH), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.dropout(self.down(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def model(dropout: float = 0.0, dtype: torch.dtype = torch.float64, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(dropout) for _ in range(blocks))).to(dtype)


def tiled(net: nn.Sequential, pieces: int = 4) -> Any:
    return lowtide.tile([block.mlp for block in net], pieces)  # pyright: ignore


def tokens(batch: int = 2, length: int = 48, dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, length, WIDTH, dtype=dtype, requires_grad=True)


def step(net: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The loss and all gradients of a step."""
    net.zero_grad()
    x.grad = None
    torch.manual_seed(2)
    loss = (run or net)(x).square().sum()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in (x, *net.parameters()) if p.grad is not None)]


def assert_close(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))


# ---- same gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [2, 5, 8, 48, 1000])
def test_gradients_are_those_of_the_whole_module(pieces: int) -> None:
    net, x = model(), tokens()
    wanted = step(net, x)
    tiled(net, pieces)
    assert_close(step(net, x), wanted)


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    net, x = model(), tokens()
    net[1].mlp.up.weight.requires_grad_(False)  # pyright: ignore
    x.requires_grad_(False)
    wanted = step(net, x)
    tiled(net)
    assert_close(step(net, x), wanted)
    assert net[1].mlp.up.weight.grad is None  # pyright: ignore


def test_with_nothing_to_train_inside_the_input_has_its_gradient() -> None:
    net, x = model(), tokens()
    net.requires_grad_(False)
    wanted = step(net, x)
    tiled(net)
    assert_close(step(net, x), wanted)


def test_a_frozen_module_on_a_frozen_input_saves_nothing() -> None:
    net, x = MLP().requires_grad_(False), torch.randn(4, 8, WIDTH)
    wanted = net(x)
    lowtide.tile(net, 4)
    found = net(x)
    assert not found.requires_grad
    torch.testing.assert_close(found, wanted)


class Several(nn.Module):
    """Two token tensors, one for all tokens, numbers; two outputs and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(4, 8)

    def forward(
        self, x: Tensor, *, other: Tensor, scale: Tensor, labels: Tensor, power: int
    ) -> dict[str, Any]:
        mixed = (self.one(x) + self.two(other)).pow(power) * scale
        loss = F.cross_entropy(mixed.flatten(0, -2), labels.flatten(), reduction="sum")
        return {"mixed": mixed, "kind": "several", "best": mixed.argmax(-1), "loss": loss}


def test_several_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    net, x = Several().double(), tokens(3, 20)
    other = torch.randn(3, 20, 4, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(3, 1, 8, dtype=torch.float64, requires_grad=True)  # one for each sequence
    labels = torch.randint(8, (3, 20))

    def run(x: Tensor) -> Tensor:
        found = net(x, other=other, scale=scale, labels=labels, power=2)
        assert found["kind"] == "several" and found["best"].shape == (3, 20)
        best.append(found["best"])
        return found["mixed"].sum() + 3 * found["loss"]

    best: list[Tensor] = []
    wanted = [*step(net, x, run), other.grad, scale.grad]
    other.grad = scale.grad = None
    lowtide.tile(net, 3)
    assert_close([*step(net, x, run), other.grad, scale.grad], wanted)  # pyright: ignore
    assert torch.equal(*best)


def test_other_dimensions_of_tokens() -> None:
    torch.manual_seed(0)
    images = torch.randn(2, WIDTH, 12, 5, dtype=torch.float64, requires_grad=True)
    net = nn.Sequential(nn.Conv2d(WIDTH, INNER, 1), nn.GELU(), nn.Conv2d(INNER, WIDTH, 1)).double()
    wanted = step(net, images)
    lowtide.tile(net, 4, dim=2)
    assert_close(step(net, images), wanted)


def test_dropout_runs_again_with_the_random_numbers_of_the_forward() -> None:
    net, x = model(0.3), tokens()
    tiled(net)
    found, weight = step(net, x), net[0].mlp.up.weight  # pyright: ignore
    assert_equal(step(net, x), found)  # and they leave the stream as it is
    direction, losses = torch.randn_like(weight), []
    names = ["loss", "x", *(name for name, _ in net.named_parameters())]
    for sign in (1, -1):
        with torch.no_grad():
            weight += sign * 1e-6 * direction
        losses.append(step(net, x)[0])
        with torch.no_grad():
            weight -= sign * 1e-6 * direction
    slope = (losses[0] - losses[1]) / 2e-6
    torch.testing.assert_close(
        slope, (found[names.index("0.mlp.up.weight")] * direction).sum(), rtol=1e-6, atol=0.0
    )


def test_a_tiled_dropout_draws_as_much_as_the_whole_one() -> None:
    net, x = MLP(0.5).double(), tokens(1, 16)
    torch.manual_seed(0)
    net(x)
    after = torch.rand(1)
    lowtide.tile(net, 4)
    torch.manual_seed(0)
    net(x).sum().backward()
    assert torch.equal(torch.rand(1), after)


def test_autocast_is_that_of_the_forward() -> None:
    net, x = model(dtype=torch.float32), tokens(dtype=torch.float32)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x).float()

    wanted = step(net, x, run)
    tiled(net)
    for one, other in zip(step(net, x, run), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))


def test_without_gradients_it_runs_in_pieces_too() -> None:
    net, x = model(), tokens()
    with torch.no_grad():
        wanted = net(x)
    tiled(net, 4)
    net[0].mlp.calls = 0  # pyright: ignore
    with torch.no_grad():
        found = net.eval()(x)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert net[0].mlp.calls >= 4  # pyright: ignore


def test_a_kept_graph_runs_backward_again() -> None:
    net, x = model(), tokens()
    tiled(net)
    loss = net(x).square().sum()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in net.parameters()]  # pyright: ignore
    net.zero_grad()
    loss.backward()
    assert_equal([p.grad for p in net.parameters()], first)  # pyright: ignore


# ---- what is kept, and how often it runs -----------------------------------------------------------


def counted(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_two_forwards_in_all() -> None:
    """Under a checkpoint, a scope and a limit that recompute the block, too."""
    net, x = model(dtype=torch.float32), tokens(2, 256, torch.float32)
    one = 3 * 2 * 2 * 256 * WIDTH * INNER * 3  # of three blocks, three products each

    def checkpointed(x: Tensor) -> Tensor:
        for block in net:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore
        return x

    def scoped(x: Tensor) -> Tensor:
        for block in net:
            with lowtide.checkpointing():
                x = block(x)
        return x

    assert counted(lambda: step(net, x)) == 3 * one
    assert counted(lambda: step(net, x, checkpointed)) < 4 * one  # all but the last product run twice
    tiled(net, 8)
    for run in (net, checkpointed, scoped):
        step(net, x, run)
        assert counted(lambda run=run: step(net, x, run)) == 4 * one
        for block in net:
            block.mlp.calls = 0
        step(net, x, run)
        assert [block.mlp.calls for block in net] == [16, 16, 16]


@needs_meter
def test_only_what_enters_is_kept_and_inside_is_there_for_a_piece() -> None:
    net = MLP()
    x = torch.randn(1, 4096, WIDTH, requires_grad=True)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            saved.append(tensor.numel())
        return tensor

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = net(x)
        y.sum().backward()

    lowtide.tile(net, 16)
    run()
    saved.clear()
    peak = lowtide.measure(run).peak_bytes
    assert saved == [x.numel()]
    entering, inside = 4 * x.numel(), 4 * 4096 * INNER
    weights = sum(4 * p.numel() for p in net.parameters())
    # the output, its gradient and that of the input; gradients of weights twice; a piece, back and forth
    assert peak <= 3 * entering + 2 * weights + 10 * inside // 16
    lowtide.tile(net, 1)
    assert lowtide.measure(run).peak_bytes > 3 * inside


def test_a_plan_can_make_the_output_again_and_keeps_only_what_enters_a_block() -> None:
    net, x = model(blocks=4), tokens()
    whole = lowtide.trace(lambda x: net(x).sum(), x, model=net, fake=True)
    tiled(net)
    graph = lowtide.trace(lambda x: net(x).sum(), x, model=net, fake=True)
    forward = [op for op in graph.operations if op.phase == "forward" and op.module]
    assert all(op.replayable for op in forward)
    kept = list[int]()
    for one in (whole, graph):
        stored = lowtide.plan(one, policy="full").stored  # type: ignore[operator]
        made = {op.writes[0] for op in one.operations if op.phase == "forward" and op.module}
        kept.append(sum(one.storages[one.values[value].storage].bytes for value in stored & made))
    assert kept[1] == kept[0]


def test_the_first_call_leaves_nothing_behind() -> None:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    tiles = lowtide.tile(layer, 2)
    gc.disable()
    try:
        entering = tokens(dtype=torch.float32) * 2
        held = StorageWeakRef(entering.untyped_storage())
        layer(entering).sum().backward()
        del entering
        assert tiles.difference is not None and held.expired()
    finally:
        gc.enable()


@needs_meter
@pytest.mark.parametrize("budget", ["min", "85%"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_under_a_limit_bits_are_as_without(budget: str, dropout: float) -> None:
    net, x = model(dropout, torch.float32, blocks=6), tokens(8, 256, torch.float32)
    tiled(net, 8)
    wanted = step(net, x)
    handle = lowtide.limit_memory(net, budget)
    for _ in range(3):
        assert_equal(step(net, x), wanted)
        assert handle.measured_peak_bytes is not None and handle.plan is not None
    assert handle.measured_peak_bytes <= handle.plan.budget_bytes  # pyright: ignore
    handle.remove()


def test_a_block_with_a_tiled_module_is_recomputed_from_what_enters_the_block() -> None:
    net, x = model(blocks=4), tokens()
    tiled(net)
    real, fake = (
        lowtide.trace(lambda y: net(y).square().mean(), x, model=net, costs=False, fake=fake)
        for fake in (False, True)
    )
    assert [(s.module, s.shape, s.droppable) for s in fake.saved] == [
        (s.module, s.shape, s.droppable) for s in real.saved
    ]
    plan = lowtide.policies.full()(fake)
    made = {fake.values[v].storage for v in plan.stored if fake.values[v].producer is not None}
    wide = [storage for storage in made if fake.storages[storage].bytes >= x.nbytes]
    assert len(wide) == 4  # what the blocks return; the MLPs' inputs are made again


# ---- what is said, and what is refused ------------------------------------------------------------------


def test_a_plan_recomputes_what_a_tiled_module_returns() -> None:
    def smallest(tile_norms: bool) -> int:
        net = model(blocks=6)
        if tile_norms:
            lowtide.tile([block.norm for block in net], 4)  # pyright: ignore
        handle = lowtide.limit_memory(net, "min")
        net(tokens(length=512)).square().mean().backward()
        peak = handle.plan.predicted_peak_bytes
        handle.remove()
        return peak

    whole, entering = smallest(False), tokens(length=512).nbytes
    assert smallest(True) < whole + entering  # of six norms, at most one output is there beside


def test_the_difference_is_measured_and_said_once() -> None:
    net, x = model(dtype=torch.float32), tokens(dtype=torch.float32)
    tiles = tiled(net)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step(net, x)
        step(net, x)
    texts = [str(one.message) for one in said if issubclass(one.category, LowtideWarning)]
    assert len(texts) == 1 and "in another order" in texts[0]
    assert tiles.difference is not None and 0 < tiles.difference < 1e-5


def test_no_difference_is_named_where_pieces_draw_other_random_numbers() -> None:
    net, x = model(dropout=0.5, dtype=torch.float32), tokens(dtype=torch.float32)
    tiles = tiled(net)
    with pytest.warns(LowtideWarning, match="not measured, because the modules draw random numbers") as said:
        step(net, x)
    assert len(said) == 1 and tiles.difference is None


def test_a_trace_on_fakes_sees_a_call_and_no_check_beside_it() -> None:
    found = list[int]()
    for checked in (False, True):
        net = model()
        tiled(net)
        if checked:
            step(net, tokens())
            net.zero_grad()
        graph = lowtide.trace(lambda x: net(x).square().sum(), tokens(), fake=True)  # noqa: B023
        found.append(len(graph.operations))
    assert found[0] == found[1]


def test_a_trace_on_fakes_takes_a_mixture_in_tiles() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    net = transformers.MixtralForCausalLM(config)  # products of matrices in groups
    lowtide.tile(net.model.layers[0].mlp, 4)
    words = torch.arange(64).view(1, 64)
    assert lowtide.trace(lambda: net(input_ids=words, labels=words).loss, fake=True).operations


@pytest.mark.parametrize("grad", [True, False])
def test_one_token_along_the_dimension_is_said(grad: bool) -> None:
    net = nn.Embedding(10, WIDTH)
    tiles = lowtide.tile(net, 4)
    with warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        net(torch.arange(8).view(1, 8))
        net(torch.arange(8).view(1, 8))
    texts = [str(one.message) for one in said]
    assert len(texts) == grad and all(r"(1, 8), one token along dim=-2" in text for text in texts)
    tiles.remove()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1), is_causal=True)


class Normed(nn.Module):
    """A batch norm without running statistics: no buffer shows it."""

    def __init__(self, track: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, track_running_stats=track)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Router(nn.Module):
    """Each expert takes as many tokens as it has room for, in their order, and drops the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.expert = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        choice = F.one_hot(self.route(x).argmax(-1), 4)
        place = (choice.cumsum(-2) * choice).sum(-1)
        return self.expert(x) * (place <= x.shape[-2] // 4).unsqueeze(-1)


class Mean(nn.Module):
    """Moves by a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)  # pyright: ignore
        return x - self.mean  # pyright: ignore


class Foreign(nn.Module):
    """Reads a weight that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [nn.Parameter(torch.ones(WIDTH))]

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weights[0]


class MeanLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class Balanced(nn.Module):
    """Experts whose router has a loss of its own: the model reads it from an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.route = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.loss = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.route(x).softmax(-1)
        self.loss = shares.mean((0, 1)).square().sum()
        return sum(expert(x) * shares[..., at, None] for at, expert in enumerate(self.experts))  # pyright: ignore


def watched() -> nn.Module:
    """An MLP of which a forward hook collects something."""
    net, found = MLP(), list[Tensor]()
    net.gate.register_forward_hook(lambda *given: found.append(given[2]))
    return net


def in_pieces() -> nn.Module:
    """An output layer whose logits stand-ins take the place of."""
    net = nn.Sequential()
    net.head = nn.Linear(WIDTH, 64)
    lowtide.chunked_loss(net)
    return net.head


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (Attention, r"tile\(Attention\): its output for one token depends on other tokens"),
        (lambda: Normed(track=False), r"tile\(Normed\): its output for one token depends on other tokens"),
        (lambda: Normed(track=True), r"tile\(Normed\): its forward writes to its buffer 'norm\.\w+'"),
        (Router, r"tile\(Router\): its output for one token depends on other tokens"),
        (Mean, r"tile\(Mean\): its forward writes to its buffer 'mean'"),
        (Foreign, r"tile\(Foreign\): its forward reads a tensor of shape \(32,\)"),
        (MeanLoss, r"tile\(MeanLoss\): it returns a tensor of shape \(\) that is neither"),
        (Balanced, r"tile\(Balanced\): a tensor that has a gradient leaves it"),
        (watched, r"tile\(MLP\): a tensor that has a gradient leaves it"),
        (in_pieces, r"tile\(Linear\): chunked_loss makes its output in pieces already"),
    ],
    ids=[
        "attention",
        "batch norm",
        "tracked",
        "capacity",
        "running mean",
        "foreign",
        "mean",
        "attribute",
        "hook",
        "logits",
    ],
)
def test_what_is_no_function_of_single_tokens_is_refused(module: Callable[[], nn.Module], said: str) -> None:
    torch.manual_seed(0)
    net = module()
    lowtide.tile(net, 4)
    with pytest.raises(lowtide.PlanError, match=said):
        net(torch.randn(2, 64, WIDTH, requires_grad=True))


def test_a_module_that_fails_on_a_piece_says_that_it_was_one() -> None:
    net = nn.BatchNorm1d(32)  # channels where tokens are thought to be
    lowtide.tile(net, 4)
    with pytest.raises(RuntimeError) as error:
        net(torch.randn(2, 32, 4))
    assert "ran on a piece of 8 tokens" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: lowtide.tile(3), r"tile\(module=\)"),  # pyright: ignore
        (lambda: lowtide.tile("mlp"), r"tile\(module=\) was given 'mlp'"),  # pyright: ignore
        (lambda: lowtide.tile([]), r"tile\(module=\)"),
        (lambda: lowtide.tile(nn.ReLU(), 0), r"tile\(pieces=\)"),
        (lambda: lowtide.tile(nn.ReLU(), dim="x"), r"tile\(dim=\)"),  # pyright: ignore
        (lambda: called(lowtide.tile, torch.randn(3)), "dim=-2"),
        (lambda: called(lowtide.tile, 3), "no tensor among its arguments"),
    ],
)
def test_bad_input_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(lowtide.PlanError, match=said):
        call()


def called(tile: Any, given: Any) -> None:
    net = nn.ReLU()
    tile(net)
    net(given)


# ---- beside others -----------------------------------------------------------------------------------------


def test_pieces_change_between_steps_and_removal_gives_the_forward_back() -> None:
    net, x = model(), tokens()
    wanted = step(net, x)
    tiles = tiled(net, 2)
    step(net, x)
    tiles.pieces = 6
    net[0].mlp.calls = 0  # pyright: ignore
    assert_close(step(net, x), wanted)
    assert net[0].mlp.calls == 12  # pyright: ignore
    tiles.remove()
    assert "forward" not in net[0].mlp.__dict__
    assert_equal(step(net, x), wanted)
    tiles.remove()


def test_a_second_call_takes_the_place_of_the_first() -> None:
    net = MLP()
    first = lowtide.tile(net, 2)
    second = lowtide.tile(net, 4)
    first.remove()
    net.calls = 0
    with torch.no_grad():
        net.eval()(torch.randn(1, 8, WIDTH))
    assert net.calls >= 4
    second.remove()
    assert "forward" not in net.__dict__


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_a_copy_runs_in_pieces_of_its_own(copied: Callable[[Any], Any]) -> None:
    net, x = model(), tokens()
    tiled(net)
    wanted = step(net, x)
    twin = copied(net)
    assert_equal(step(twin, x), wanted)
    twin[0].mlp.calls = net[0].mlp.calls = 0
    step(twin, x)
    assert net[0].mlp.calls == 0 and twin[0].mlp.calls == 8


def test_state_dict_and_hooks_see_the_module() -> None:
    net, x = model(), tokens()
    names, seen = list(net.state_dict()), list[tuple[int, ...]]()
    tiled(net)
    assert list(net.state_dict()) == names
    net[0].mlp.register_forward_hook(lambda *given: seen.append(tuple(given[2].shape)))  # pyright: ignore
    step(net, x)
    assert seen == [(2, 48, WIDTH)]


@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_ranks_reduce_each_gradient_once(wrap: str, one_rank: Callable[[], None]) -> None:
    one_rank()
    net, x = model(dtype=torch.float32), tokens(dtype=torch.float32)
    wanted = step(net, x)
    tiled(net)
    around: Any = net
    if wrap == "ddp":
        around = nn.parallel.DistributedDataParallel(net)
    else:
        from torch.distributed.fsdp import fully_shard

        for block in net:
            fully_shard(block)
        fully_shard(net)
    found = step(around, x)
    for one, other in zip(found, wanted, strict=True):
        full = one.full_tensor() if hasattr(one, "full_tensor") else one  # pyright: ignore
        torch.testing.assert_close(full, other, rtol=1e-4, atol=1e-4)
    del around


def test_units_of_fsdp_inside_are_refused(one_rank: Callable[[], None]) -> None:
    one_rank()
    from torch.distributed.fsdp import fully_shard

    net = MLP()
    fully_shard(net.up)
    lowtide.tile(net)
    with pytest.raises(lowtide.PlanError, match="'up' is a unit of fully_shard"):
        net(torch.randn(1, 16, WIDTH))


def test_a_compiled_model_runs_it_outside_of_its_graphs() -> None:
    net, x = model(dtype=torch.float32), tokens(dtype=torch.float32)
    wanted = step(net, x)
    tiled(net)
    compiled = torch.compile(net, backend="aot_eager")
    for one, other in zip(step(net, x, compiled), wanted, strict=True):  # pyright: ignore
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch.compiler.reset()
