"""Models whose ranks share every sequence train as the model of one process does."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from lowtide import parallel as lp
from lowtide.models import preset
from lowtide.models.gpt import GPT
from lowtide.models.llama import Llama
from lowtide.parallel.context.layout import Layout

transformers = pytest.importorskip("transformers")
pytestmark = on_each_backend
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 67, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "gemma3_text": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"num_key_value_heads": 4},
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0, "resid_pdrop": 0,
        "embd_pdrop": 0,
    },
}  # fmt: skip
LENGTH, STEPS, CLIP = 31, 10, 0.5


def in_float64(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    *,
    shift_labels: Any = None,
    num_items_in_batch: Any = None,
    **_: Any,
) -> Tensor:
    """transformers' loss, which is made in float32 there."""
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), reduction="sum")
    return loss / ((shift_labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        if kind in ("gpt", "gpt chunks"):
            config = preset("gpt-nano")
            chunks = 3 if kind == "gpt chunks" else 1
            heads = {"heads": 4, "key_value_heads": 4}
            return GPT(dataclasses.replace(config, vocabulary=67, loss_chunks=chunks, **heads))
        if kind == "built-in llama":
            return Llama(dataclasses.replace(preset("llama-nano"), vocabulary=67))
        own = {} if kind == "gpt2" else SMALL
        config = transformers.AutoConfig.for_model(kind, **{**own, "vocab_size": 67, **KINDS[kind]})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").double()
        model.loss_function = in_float64
        return model
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """The models' code is imported once, before the processes are made."""
    for kind in KINDS:
        make(kind)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Runs of consecutive numbers, and labels of which some are ignored: more in one half of the sequence."""
    tokens = (torch.randint(67, (2, 1), generator=seeded(step)) + torch.arange(LENGTH)) % 67
    labels = tokens.clone()
    labels[0, 3:11] = -100
    return tokens, labels


def loss_of(model: Any, step: int, **more: Any) -> Tensor:
    tokens, labels = batch(step)
    config = getattr(model, "module", model).config
    if hasattr(config, "model_type"):
        return model(input_ids=tokens, labels=labels, **more).loss
    return model(tokens, F.pad(labels, (0, 1), value=-100)[:, 1:]).loss


def train(model: nn.Module, steps: int = STEPS, **more: Any) -> list[float]:
    """Losses and norms of clipped steps."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.9, foreach=False)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, **more)
        loss.backward()
        lp.allreduce_sequence_parallel_gradients(optimizer)
        norm = lp.clip_grad_norm(model.parameters(), CLIP)
        optimizer.step()
        found += [loss.item(), float(norm)]
    return found


def worst(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@patch.object(Tensor, "float", Tensor.double)  # Gemma's norms add up their weights' gradients in it
def differences(kinds: list[str], exchange: Any) -> dict[str, float]:
    found = {}
    for kind in kinds:
        expected = train(make(kind))
        assert expected[0] - expected[-2] > 0.1, f"{kind} does not learn"
        found[kind] = worst(train(lp.context_parallel(make(kind), dist.group.WORLD, exchange)), expected)
    return found


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        (2, ["gpt", "mistral"]),
        pytest.param(2, ["gpt chunks", "built-in llama", *KINDS], marks=pytest.mark.slow),
        pytest.param(4, ["gpt", "mistral", "llama"], marks=pytest.mark.slow),
    ],
)
def test_ten_steps(size: int, kinds: list[str], exchange: str) -> None:
    for found in on_ranks(size, differences, kinds, exchange):
        assert max(found.values()) < 1e-12, found


def meshed(kind: str, exchange: Any, beside: str) -> float:
    """The largest difference from one process, with something else beside on four processes."""
    expected = train(make(kind), 4)
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "cp"))
    flat, model = mesh._flatten("dp_cp"), make(kind)
    if beside in ("tp", "sp"):
        tp = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("cp", "tp"))
        lp.context_parallel(lp.parallelize(model, tp["tp"], beside == "sp"), tp["cp"], exchange)
        found = train(model, 4)
    elif beside == "ddp":
        model = nn.parallel.DistributedDataParallel(
            lp.context_parallel(model, mesh["cp"], exchange), process_group=flat.get_group()
        )
        found = train(model, 4)
    else:
        own = {"fsdp": flat, "fsdp of dp": mesh["dp"]}[beside]
        lp.context_parallel(model, mesh["cp"], exchange)
        inner: Any = model.model
        for layer in inner.layers:
            fully_shard(layer, mesh=own)
        fully_shard(model, mesh=own)
        lp.mark_partial_gradients(model)
        found = train(model, 4)
    return worst(found, expected)


@pytest.mark.parametrize(
    ("exchange", "beside"),
    [
        ("ring", "fsdp"), ("all-to-all", "fsdp"), ("ring", "fsdp of dp"), ("ring", "ddp"), ("ring", "tp"),
        ("all-to-all", "sp"),
    ],
)  # fmt: skip
def test_beside_what_shares_the_model(exchange: str, beside: str) -> None:
    """Ranks with the same tokens stand for data parallelism: the mean of equal gradients is one of them."""
    for found in on_ranks(4, meshed, "llama", exchange, beside):
        assert found < 1e-12


def packed(kind: str, exchange: Any) -> float:
    """The largest difference of packed and of padded sequences from one process."""
    starts = torch.tensor([0, 1, 9, 20, LENGTH])
    positions = torch.cat([torch.arange(int(n)) for n in starts.diff()]).expand(2, -1)
    padding = torch.ones(2, LENGTH, dtype=torch.int64)
    padding[0, :6], padding[1, -9:] = 0, 0
    found = []
    for more in ({"position_ids": positions}, {"attention_mask": padding}):
        tokens, labels = batch(0)
        if "attention_mask" in more:
            labels = labels.masked_fill(padding == 0, -100)
            labels[0, 6] = -100  # what a token of the padding would have to predict
        models = make(kind), lp.context_parallel(make(kind), dist.group.WORLD, exchange)
        losses, norms, logits = [], [], []
        for model in models:
            out = model(input_ids=tokens, labels=labels, use_cache=False, **more)
            out.loss.backward()
            lp.allreduce_sequence_parallel_gradients(model)
            losses.append(out.loss.item())
            norms.append(lp.get_grad_norm(model.parameters()).item())
            logits.append(lp.gather_sequence(out.logits.detach(), model, LENGTH)[labels != -100])
        found += [abs(losses[0] - losses[1]), abs(norms[0] - norms[1]), (logits[0] - logits[1]).abs().max()]
    return float(max(found))


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_packed_and_padded_sequences(exchange: str) -> None:
    for kind in ("llama", "mistral"):
        for found in on_ranks(2, packed, kind, exchange):
            assert found < 1e-12, kind


def saved_bytes(model: nn.Module, kind: str) -> int:
    """Bytes of storages that autograd keeps beside parameters."""
    seen: dict[int, int] = {}
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(67, (2, 64), generator=seeded(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held = model(tokens, tokens) if "gpt" in kind else model(input_ids=tokens, labels=tokens)
    assert held.loss is not None
    return sum(seen.values())


def shares(kinds: list[str], exchange: Any) -> dict[str, float]:
    """Bytes that a rank saves, as a part of what one process does."""
    return {
        kind: saved_bytes(lp.context_parallel(make(kind), dist.group.WORLD, exchange), kind)
        / saved_bytes(make(kind), kind)
        for kind in kinds
    }


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
@pytest.mark.parametrize("size", [2, 4])
def test_saved_bytes(size: int, exchange: str) -> None:
    kinds = ["gpt", "llama"] if size == 2 or exchange == "ring" else ["gpt"]
    for found in on_ranks(size, shares, kinds, exchange):
        for kind, share in found.items():
            assert abs(share * size - 1) < 0.01, (kind, share * size)


def checkpointed(exchange: Any) -> float:
    """The largest difference of losses and norms with layers that transformers runs again in backward."""
    expected = train(make("llama"), 3)
    model: Any = make("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return worst(train(lp.context_parallel(model, dist.group.WORLD, exchange), 3), expected)


def own_loss(exchange: Any) -> float:
    """The same with a loss of the program's own, of losses of tokens that were gathered."""
    expected = train(make("qwen3"), 1)
    model: Any = lp.context_parallel(make("qwen3"), dist.group.WORLD, exchange)
    tokens, labels = batch(0)
    shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
    logits = model(input_ids=tokens).logits
    own = lp.shard_sequence(shifted, model, fill=-100)
    losses = F.cross_entropy(logits.transpose(1, 2), own, reduction="none")
    loss = lp.gather_sequence(losses, model, LENGTH).sum() / (shifted != -100).sum()
    loss.backward()
    lp.allreduce_sequence_parallel_gradients(model)
    return worst([loss.item(), lp.get_grad_norm(model.parameters()).item()], expected)


def copied(exchange: Any) -> float:
    """The same with a copy of the model."""
    model = copy.deepcopy(lp.context_parallel(make("llama"), dist.group.WORLD, exchange))
    return worst(train(model, 2), train(make("llama"), 2))


@patch.object(Tensor, "float", Tensor.double)
def routed(exchange: Any) -> float:
    """The largest difference of losses and norms of experts whose routers have a loss: it is the mean of that
    of the ranks' tokens, as data-parallel ranks have it.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    found, coefficient = [], 0.5
    more = {"num_local_experts": 4, "router_aux_loss_coef": coefficient, "output_router_logits": True}
    config = transformers.AutoConfig.for_model("mixtral", **{**SMALL, "vocab_size": 67, **more})
    tokens = torch.randint(67, (2, 32), generator=seeded(0))
    for shared in (False, True):
        torch.manual_seed(0)
        model: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="sdpa", experts_implementation="eager"
        ).double()
        model.loss_function = in_float64
        if shared:
            lp.context_parallel(model, dist.group.WORLD, exchange)
            loss = model(input_ids=tokens, labels=tokens).loss
        else:
            out = model(input_ids=tokens, labels=tokens)
            layout = Layout(2, exchange == "ring")
            routers = [one.unflatten(0, (2, 32)) for one in out.router_logits]
            parts = [[layout.take(one, rank, 1).flatten(0, 1) for one in routers] for rank in range(2)]
            means = sum(load_balancing_loss_func(tuple(part), 4, 2) for part in parts) / 2
            assert abs(means - out.aux_loss) > 1e-6
            loss = out.loss + coefficient * (means - out.aux_loss)
        loss.backward()
        lp.allreduce_sequence_parallel_gradients(model)
        found.append([loss.item(), lp.get_grad_norm(model.parameters()).item()])
    return worst(*found)


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_losses_of_routers(exchange: str) -> None:
    for found in on_ranks(2, routed, exchange):
        assert found < 1e-12


def autocast(exchange: Any) -> float:
    """The largest difference of losses in bfloat16; norms make queries and keys in float32, not values."""
    losses = []
    for kind in ("qwen3", "gemma3_text"):
        for shared in (False, True):
            model: Any = make(kind).float()
            if shared:
                model = lp.context_parallel(model, dist.group.WORLD, exchange)
            tokens, labels = batch(0)
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
            loss.backward()
            lp.allreduce_sequence_parallel_gradients(model)
            losses.append(loss.item())
    return max(abs(losses[0] - losses[1]), abs(losses[2] - losses[3]))


@pytest.mark.parametrize("exchange", ["ring", "all-to-all"])
def test_autocast(exchange: str) -> None:
    for found in on_ranks(2, autocast, exchange):
        assert found < 0.02


@pytest.mark.parametrize("body", [checkpointed, own_loss, copied])
def test_programs(body: Any) -> None:
    for found in on_ranks(2, body, "ring"):
        assert found < 1e-12


def refused() -> dict[str, str]:
    """What is said of what cannot be done."""
    said = {}
    model: Any = lp.context_parallel(make("llama"), dist.group.WORLD, "ring")
    tokens, labels = batch(0)

    def says(name: str, call: Any) -> None:
        with pytest.raises(lp.ParallelError) as error:
            call()
        said[name] = str(error.value)

    says("twice", lambda: lp.context_parallel(model, dist.group.WORLD))
    says("generates", lambda: model(input_ids=tokens, use_cache=True))
    says(
        "holes",
        lambda: model(input_ids=tokens, attention_mask=(torch.arange(LENGTH) % 5 > 0).int().expand(2, -1)),
    )
    says("weights", lambda: model(input_ids=tokens, token_weights=torch.ones(2, LENGTH)))
    says(
        "part",
        lambda: model.model.layers[0](
            torch.zeros(1, 2, 32).double(), position_embeddings=(torch.ones(1, 2, 8),) * 2
        ),
    )
    model(input_ids=tokens, labels=labels).loss.backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    says("not summed", optimizer.step)
    says("no norm", lambda: lp.clip_grad_norm(model.parameters(), 1.0))
    dropping: Any = make("llama")
    dropping.config.attention_dropout = 0.5
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.5
    shared: Any = lp.context_parallel(dropping.train(), dist.group.WORLD, "ring")
    says("drops", lambda: shared(input_ids=tokens))
    says("unknown", lambda: lp.context_parallel(make("mistral"), dist.group.WORLD, "rings"))  # type: ignore
    says("no heads", lambda: lp.context_parallel(nn.Linear(2, 2), dist.group.WORLD))
    return said


def test_what_cannot_be_done_is_said() -> None:
    for said in on_ranks(2, refused):
        assert "allreduce_sequence_parallel_gradients" in said["not summed"]
        assert "exchange='all-to-all'" in said["drops"]
        assert "padding between tokens" in said["holes"]


def test_one_rank_is_left_as_it_is() -> None:
    model = make("llama")
    assert lp.context_parallel(model) is model and not hasattr(model, "context")
    assert lp.partial_gradients(model.parameters()) == []
