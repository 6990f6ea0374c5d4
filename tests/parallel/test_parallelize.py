"""Hugging Face models shared by two and four processes train as the model of one process does."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counted import Collectives
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn

import lowtide
from lowtide import parallel as lp

transformers = pytest.importorskip("transformers")
pytestmark = on_each_backend
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 67,
    "max_position_embeddings": 64, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"num_key_value_heads": 2}),
    "llama tied": (
        "llama",
        {"num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox serial": ("gpt_neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "mistral": ("mistral", {"num_key_value_heads": 1, "head_dim": 8, "sliding_window": 8}),
}
STEPS = 6


def make(kind: str, **changes: Any) -> nn.Module:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **own, **changes})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()


def batch(step: int, sequence: int = 16) -> Tensor:
    """Two runs of consecutive numbers, which a model learns to continue."""
    starts = torch.randint(SMALL["vocab_size"], (2, 1), generator=seeded(step))
    return (starts + torch.arange(sequence)) % SMALL["vocab_size"]


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The models' code is imported once, before the processes are made."""
    for kind in ("llama", "gpt_neox", "qwen2", "qwen3", "mistral"):
        make(kind)


def train(model: nn.Module, steps: int = STEPS) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        lp.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def alone(kind: str) -> list[float]:
    """Losses of one process, which the processes that are made later know."""
    found = train(make(kind))
    assert found[0] - found[-1] > 0.04, f"{kind}: the model does not learn, so the losses say little"
    return found


def losses(kinds: list[str], sequence_parallel: bool) -> list[str]:
    faults = []
    for kind in kinds:
        expected = alone(kind)
        found = train(lp.parallelize(make(kind), dist.group.WORLD, sequence_parallel))
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        if worst > 1e-6:  # the loss is made in float32
            faults.append(f"{kind}: losses differ by {worst}: {expected} {found}")
    return faults


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_steps_on_two_processes(sequence_parallel: bool) -> None:
    kinds = list(KINDS) if sequence_parallel else ["llama tied", "qwen3", "gpt_neox"]
    for kind in kinds:
        alone(kind)
    for faults in on_ranks(2, losses, kinds, sequence_parallel):
        assert not faults, "\n".join(faults)


def test_fewer_key_value_heads_than_ranks() -> None:
    """Two key-value heads, and one, on four ranks."""
    for kind in ("llama", "mistral"):
        alone(kind)
    for faults in on_ranks(4, losses, ["llama", "mistral"], True):
        assert not faults, "\n".join(faults)


def counted() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Collectives that one more layer adds to forward and backward; and those that full recomputation adds to
    the backward of two layers, in the third step, which follows its plan's script."""
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    found = []
    for depth, policy in ((1, ""), (2, ""), (2, "full")):
        model = lp.parallelize(make("llama", num_hidden_layers=depth, vocab_size=68), dist.group.WORLD, True)
        if policy:
            lowtide.limit_memory(model, policy=policy)
        for _ in range(3 if policy else 1):
            model.zero_grad()
            with Collectives() as forward:
                loss = model(input_ids=batch(0), labels=batch(0)).loss
            with Collectives() as backward:
                loss.backward()
        found.append((forward.seen, backward.seen))

    def more(a: list[str], b: list[str]) -> dict[str, int]:
        return {kind: b.count(kind) - a.count(kind) for kind in ("AG", "RS", "AR")}

    one, two, full = found
    return more(one[0], two[0]), more(one[1], two[1]), more(two[1], full[1])


def test_one_transfer_a_region() -> None:
    """q, k and v share a gather, and so do gate and up: two gathers and two reduce-scatters a layer, as in a
    model of our own. Under full recomputation the products gather once more, beside their weights'
    gradients; of the reduce-scatters only the first is read again."""
    for forward, backward, full in on_ranks(2, counted):
        assert forward == {"AG": 2, "RS": 2, "AR": 0}
        assert backward == {"AG": 4, "RS": 2, "AR": 0}
        assert full == {"AG": 4, "RS": 2, "AR": 0}


def saved() -> tuple[int, int]:
    """Bytes of the MLP's input that autograd keeps, and that a piece of the sequence has."""
    model: Any = lp.parallelize(make("llama", num_hidden_layers=1), dist.group.WORLD, True)
    storages: dict[int, int] = {}
    x = torch.randn(2, 8, 32, dtype=torch.float64, requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape[-1] == 32 and tensor.ndim == 3:
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model.model.layers[0].mlp(x)
    assert out.shape == x.shape
    return sum(storages.values()), x.untyped_storage().nbytes()


def test_only_the_shard_is_saved() -> None:
    for found, piece in on_ranks(2, saved):
        assert found == piece


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("llama tied", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24}, "3 .* to 4"),
    ("qwen3", {"num_attention_heads": 6, "num_key_value_heads": 3}, "6 .* to 8"),
    ("mistral", {"num_attention_heads": 5, "num_key_value_heads": 1}, "5 .* to 10"),
    ("gpt_neox", {"num_attention_heads": 3, "hidden_size": 24}, "3 .* to 4"),
]


def odd_heads(sequence_parallel: bool) -> list[str]:
    """Losses, gradient norms and weights of models whose heads the ranks do not divide."""
    faults = []
    for kind, changes, words in ODD:
        whole = make(kind, **changes)
        shared = make(kind, **changes)
        with pytest.warns(lp.ParallelWarning, match=f"{words}: the padding takes memory and time on 2 ranks"):
            lp.parallelize(shared, dist.group.WORLD, sequence_parallel)
        expected, found = train(whole, 3), train(shared, 3)
        norms = [float(lp.get_grad_norm(model.parameters())) for model in (whole, shared)]
        weights = lp.whole_state_dict(shared)
        worst = max(float((weights[key] - weight).abs().max()) for key, weight in whole.state_dict().items())
        if max(abs(a - b) for a, b in zip(expected, found, strict=True)) > 1e-6 or worst > 1e-4:
            faults.append(f"{kind}: {expected} {found}, weights differ by {worst}")
        if abs(norms[0] / norms[1] - 1) > 1e-5:
            faults.append(f"{kind}: norms {norms}")
    return faults


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_heads_that_the_ranks_do_not_divide(sequence_parallel: bool) -> None:
    assert on_ranks(2, odd_heads, sequence_parallel) == [[]] * 2


def refusals() -> bool:
    odd: dict[str, Any] = {
        "num_attention_heads": 6,
        "hidden_size": 48,
        "head_dim": 8,
        "num_key_value_heads": 3,
    }
    model = make("llama", **odd, intermediate_size=50)
    with pytest.raises(lp.ParallelError, match="output_size=50 does not divide"):
        lp.parallelize(model, dist.group.WORLD)
    shared = lp.parallelize(make("llama", **odd), dist.group.WORLD, True)
    with pytest.raises(lp.ParallelError, match=r"length 16 .* 3 ranks: pad it by 2 to 18"):
        shared(input_ids=batch(0))
    with pytest.raises(lp.ParallelError, match="shared already"):
        lp.parallelize(shared, dist.group.WORLD)
    with pytest.raises(lp.ParallelError, match="publishes no tensor-parallel plan"):
        lp.parallelize(nn.Sequential(nn.Linear(2, 2)), dist.group.WORLD)
    with pytest.raises(lp.ParallelError, match="'layers' the style 'sideways'"):
        lp.parallelize(make("llama"), dist.group.WORLD, plan={"layers": "sideways"})
    with pytest.raises(lp.ParallelError, match="no module is called that"):
        lp.parallelize(make("llama"), dist.group.WORLD, plan={"model.layers.*.nothing": "colwise"})
    different = make("llama", **odd)
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(different.parameters()).add_(1)
    with pytest.raises(lp.ParallelError, match="hold different weights"):
        lp.parallelize(different, dist.group.WORLD)
    return True


def test_refusals() -> None:
    assert all(on_ranks(3, refusals))


def own_plan() -> float:
    """A plan that the user gives for a model that is not from Hugging Face."""

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x).relu())

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)

    torch.manual_seed(0)
    alone = nn.ModuleDict({"layers": nn.ModuleList(Layer() for _ in range(3))})
    shared = copy.deepcopy(alone)
    lp.parallelize(
        shared, dist.group.WORLD, True, plan={"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    )
    x, outs = torch.randn(2, 4, 8), []
    for model in (alone, shared):
        h = x
        for layer in model["layers"]:  # type: ignore[union-attr]
            h = layer(h)
        outs.append(h)
    return float((outs[0] - outs[1]).abs().max())


def test_a_plan_of_ones_own() -> None:
    assert all(difference < 1e-6 for difference in on_ranks(2, own_plan))


class Forgetful(nn.Module):
    """Hands its column-parallel layer something that it made of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x * 1.0).relu())


def forgetful() -> bool:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
    for sequence_parallel in (True, False):
        torch.manual_seed(0)
        model: Any = nn.ModuleDict({"layers": nn.ModuleList([Forgetful()])})
        expected = model["layers"][0](torch.ones(2, 4, 8))
        lp.parallelize(model, dist.group.WORLD, sequence_parallel, plan=plan)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = model["layers"][0](torch.ones(2, 4, 8))
        assert torch.allclose(found, expected, atol=1e-6)
        texts = [str(warning.message) for warning in said if issubclass(warning.category, lp.ParallelWarning)]
        assert bool(texts) == sequence_parallel and all(
            "the whole sequence is saved" in text for text in texts
        )
    return True


def test_a_layer_called_with_what_has_forgotten_its_shard_says_so() -> None:
    assert all(on_ranks(2, forgetful))
