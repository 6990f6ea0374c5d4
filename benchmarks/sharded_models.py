"""Eight small families of models and five ways to share each among ranks, for `benchmarks.sharded`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

LAYERS, WIDTH, HEADS, BATCH, SEQUENCE, VOCABULARY = 4, 128, 4, 4, 128, 256
EXPERTS, RANK, PIXELS, PATCH, CLASSES = 4, 8, 40, 4, 16
LARGER = {"WIDTH": 256, "BATCH": 2, "SEQUENCE": 512, "PIXELS": 88}
"""Sizes of models whose steps compute for most of their time, where times are compared: half of their
operations take 0.2 to 0.6 ms on one core. A sequence is twice as long as a block is wide, as in Llama 3 8B at
8,192 tokens."""


def make_larger() -> None:
    """From here on models and batches of this process are `LARGER`."""
    globals().update(LARGER)


class Attention(nn.Module):
    """Attention of one sequence to itself or to another one.

    Args:
        heads: of keys and values; there are `HEADS` of queries.
        causal: no position looks ahead.
        biased: each head adds a learned number to each distance (T5).
    """

    def __init__(self, heads: int = HEADS, causal: bool = True, biased: bool = False) -> None:
        super().__init__()
        self.heads, self.causal, narrow = heads, causal, WIDTH // HEADS * heads
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, narrow), nn.Linear(WIDTH, narrow)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Embedding(2 * SEQUENCE, HEADS) if biased else None

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            linear(of).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear, of in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        if self.heads != HEADS:  # grouped queries
            k, v = (t.repeat_interleave(HEADS // self.heads, 1) for t in (k, v))
        mask = None
        if self.bias is not None:
            here = torch.arange(q.shape[2])
            mask = self.bias(here[:, None] - here + SEQUENCE).permute(2, 0, 1)[None].to(q.dtype)
            if self.causal:
                mask = mask + torch.full((q.shape[2], q.shape[2]), -1e4, dtype=q.dtype).triu(1)
        found = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal and mask is None)
        return self.out(found.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers and GELU; between them so many times the width."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, times * WIDTH), nn.Linear(times * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Gated(nn.Module):
    """The feed-forward part of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((WIDTH, 3 * WIDTH),) * 2 + ((3 * WIDTH, WIDTH),)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """Each token goes to two of the experts, as many as come to each: shapes differ from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(MLP(2) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        shares, chosen = self.router(tokens).softmax(-1).topk(2)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * shares[rows, places, None])
        return out.view_as(x)


class Block(nn.Module):
    """Norm, attention, norm, feed-forward."""

    def __init__(
        self, attention: Callable[[], nn.Module] = Attention, mlp: Any = MLP, norm: Any = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = norm(WIDTH), attention(), norm(WIDTH), mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CrossBlock(Block):
    """A decoder's block of T5: it looks at what the encoder has made."""

    def __init__(self) -> None:
        super().__init__(partial(Attention, biased=True), norm=nn.RMSNorm)
        self.norm3, self.cross = nn.RMSNorm(WIDTH), Attention(causal=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # pyright: ignore
        x = x + self.attention(self.norm1(x))
        x = x + self.cross(self.norm3(x), memory)
        return x + self.mlp(self.norm2(x))


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter, which is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Model(nn.Module):
    """A model that returns its loss.

    Attributes:
        checkpoints: whether each block is under `torch.utils.checkpoint`.
    """

    def __init__(self, block: Callable[[], nn.Module], norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.checkpoints = False
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm, self.head = norm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def run(self, blocks: nn.ModuleList, x: Tensor, *more: Tensor) -> Tensor:
        """The blocks in turn."""
        for block in blocks:
            x = checkpoint(block, x, *more, use_reentrant=False) if self.checkpoints else block(x, *more)
        return x


class Decoder(Model):
    """A language model on tokens."""

    def __init__(self, block: Callable[[], nn.Module], tied: bool = False, norm: Any = nn.LayerNorm) -> None:
        super().__init__(block, norm)
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(SEQUENCE, WIDTH)
        self.tied = tied
        self.tie()

    def tie(self) -> None:
        """Have the head use the embedding's weight, where it is to."""
        if self.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1])[None])
        logits = self.head(self.norm(self.run(self.blocks, x)))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())


class Patches(nn.Module):
    """From images (batch, 3, `PIXELS`, `PIXELS`) to (batch, patches, `WIDTH`)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        return self.convolution(images).flatten(2).transpose(1, 2)


class ViT(Model):
    """A classifier of images."""

    def __init__(self) -> None:
        super().__init__(partial(Block, partial(Attention, causal=False)))
        self.patches, self.places = Patches(), nn.Embedding(SEQUENCE, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        places = self.places(torch.arange((PIXELS // PATCH) ** 2)[None])
        x = self.run(self.blocks, self.patches(images) + places)
        return F.cross_entropy(self.head(self.norm(x)).mean(1).float(), images[:, 0, 0, 0].long() % CLASSES)


class T5(Model):
    """An encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__(CrossBlock, nn.RMSNorm)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        attention = partial(Attention, causal=False, biased=True)
        self.encoder = nn.ModuleList(Block(attention, norm=nn.RMSNorm) for _ in range(LAYERS // 2))
        self.blocks = self.blocks[: LAYERS // 2]
        self.between = nn.RMSNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        memory = self.between(self.run(self.encoder, self.tokens(tokens)))
        x = self.run(self.blocks, self.tokens(tokens.roll(1, 1)), memory)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens.flatten())


def adapted() -> Decoder:
    """A decoder of which adapters alone are trained."""
    model = Decoder(Block).requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "v"):
            setattr(block.attention, name, Adapted(getattr(block.attention, name)))  # type: ignore[arg-type]
    return model


FAMILIES: dict[str, Callable[[], Model]] = {
    "GPT": lambda: Decoder(Block),
    "Llama, grouped queries": lambda: Decoder(
        partial(Block, partial(Attention, HEADS // 2), Gated, nn.RMSNorm), norm=nn.RMSNorm
    ),
    "ViT": ViT,
    "T5": T5,
    "mixture of experts": lambda: Decoder(partial(Block, mlp=Mixture)),
    "LoRA": adapted,
    "tied embeddings": lambda: Decoder(Block, tied=True),
    "bf16 policy": lambda: Decoder(Block),
}


def batch(family: str, seed: int) -> Tensor:
    """What a step of a family is called with."""
    generator = torch.Generator().manual_seed(seed)
    if family == "ViT":
        return torch.randint(256, (BATCH, 3, PIXELS, PIXELS), generator=generator).float()
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


# ---- ways to share -------------------------------------------------------------------------------


def fully_sharded(model: Model, family: str, mesh: Any) -> Model:
    """Each block a unit of FSDP2, and the root."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if family == "bf16 policy":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in (*getattr(model, "encoder", ()), *model.blocks):
        fully_shard(block, **options)
    return fully_shard(model, **options)  # pyright: ignore


def tensor_parallel(model: Model, mesh: Any, sequence: bool) -> Model:
    """Heads and feed-forward layers split among ranks, with DTensors as in PyTorch's tutorials.

    Args:
        model: the model.
        mesh: of one dimension.
        sequence: what lies between is split along the sequence.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    whole, between = Replicate(), Shard(1) if sequence else Replicate()
    plan: dict[str, Any] = {}

    def rows(output: Any = between) -> Any:
        return RowwiseParallel(output_layouts=output)

    def enter(inputs: int, local: bool) -> Any:
        return PrepareModuleInput(
            input_layouts=(between,) * inputs,
            desired_input_layouts=(whole,) * inputs,
            use_local_output=local,
        )

    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, Attention):
            plan |= {f"{name}.{part}": ColwiseParallel() for part in "qkv"} | {f"{name}.out": rows()}
            for part in "qkv":
                if isinstance(getattr(module, part), Adapted):
                    del plan[f"{name}.{part}"]
                    plan |= {f"{name}.{part}.base": ColwiseParallel(), f"{name}.{part}.b": ColwiseParallel()}
            if module.bias is not None:
                plan[f"{name}.bias"] = ColwiseParallel()
            if sequence:
                plan[name] = enter(2 if last == "cross" else 1, isinstance(module.q, Adapted))
        elif isinstance(module, MLP | Gated):
            expert = ".experts." in name
            plan |= {f"{name}.{part}": ColwiseParallel() for part in ("gate", "up") if hasattr(module, part)}
            plan[f"{name}.down"] = rows(whole if expert else between)
            if sequence and not expert:
                plan[name] = enter(1, False)
        elif isinstance(module, Mixture) and sequence:
            plan[name] = (
                enter(1, True),
                PrepareModuleOutput(output_layouts=(whole,), desired_output_layouts=(between,)),
            )
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and sequence:
            plan[name] = SequenceParallel(use_local_output=last in ("norm", "between"))
    plan["head"] = ColwiseParallel(input_layouts=between, output_layouts=whole)
    for name in ("tokens", "places"):
        if hasattr(model, name):
            plan[name] = RowwiseParallel(input_layouts=whole, output_layouts=between)
    if isinstance(model, ViT) and sequence:
        plan["patches"] = PrepareModuleOutput(output_layouts=(whole,), desired_output_layouts=(between,))
    for name, styles in plan.items():
        for style in styles if isinstance(styles, tuple) else (styles,):
            parallelize_module(model.get_submodule(name), mesh, style)
    if isinstance(model, Decoder):
        model.tie()
    return model


def _two_by_two(*names: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=names)


def line() -> Any:
    """The mesh of all ranks in one dimension."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (dist.get_world_size(),))


def _both(model: Model, family: str) -> Model:
    mesh = _two_by_two("fsdp", "tp")
    return fully_sharded(tensor_parallel(model, mesh["tp"], False), family, mesh["fsdp"])


def _in_units(model: Model, family: str) -> Model:
    return fully_sharded(model, family, line())


def _in_bf16(model: Model, family: str) -> Model:
    """There is no policy of mixed precision without FSDP: all of the model is in bf16."""
    return model.bfloat16() if family == "bf16 policy" else model


WAYS: dict[str, tuple[int, Callable[[Model, str], Model]]] = {
    "FSDP2": (2, _in_units),
    "FSDP2, larger": (2, _in_units),
    "HSDP": (4, lambda model, family: fully_sharded(model, family, _two_by_two("replicate", "shard"))),
    "tp": (2, lambda model, family: tensor_parallel(_in_bf16(model, family), line(), False)),
    "tp, sequence": (2, lambda model, family: tensor_parallel(_in_bf16(model, family), line(), True)),
    "tp x FSDP2": (4, _both),
}
"""Name -> how many ranks, and what shares a model among them."""


def build(family: str, way: str) -> Model:
    """A family's model, shared among the ranks of the process group; always the same weights."""
    torch.manual_seed(0)
    return WAYS[way][1](FAMILIES[family](), family)
