"""GPT-NeoX on lowtide's parallel layers: what a model needs to be shared by several ranks, from its first
line to its training step.

    torchrun --nproc-per-node 2 examples/gpt_neox.py
    torchrun --nproc-per-node 2 examples/gpt_neox.py --budget 70%       # and within 70 % of the memory that
    the plain step takes

Parameters have the names of the Hugging Face model, so its weights load: ``load_whole_state_dict(model,
hugging_face.state_dict())``. Without writing anything, ``lowtide.parallel.parallelize(hugging_face, mesh,
sequence_parallel=True)`` shares that model itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import lowtide
from lowtide.parallel import (
    ColumnParallelLinear,
    LayerNorm,
    ParallelEmbedding,
    RowParallelLinear,
    allreduce_sequence_parallel_gradients,
    parallel_cross_entropy,
)


@dataclass(frozen=True)
class Config:
    """The shape of a small GPT-NeoX."""

    vocab_size: int = 256
    hidden_size: int = 128
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    rotary_fraction: float = 0.25
    rotary_base: float = 10_000.0
    layer_norm_eps: float = 1e-5


def rotate(x: Tensor, positions: Tensor, width: int, base: float) -> Tensor:
    """Rotate the first ``width`` features of each head by its position; the others pass."""
    frequency = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
    angle = torch.outer(positions.float(), frequency).repeat(1, 2)
    turned, passed = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * angle.cos().to(x.dtype) + torch.cat((-second, first), -1) * angle.sin().to(x.dtype)
    return torch.cat((turned, passed), -1)


class Attention(nn.Module):
    """q, k and v of a head lie together in the fused weight, so a plain cut of its rows gives each rank whole
    heads.
    """

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        self.head_size = config.hidden_size // config.num_attention_heads
        self.rotary, self.base = int(self.head_size * config.rotary_fraction), config.rotary_base
        shared = dict(sequence_parallel_enabled=True, sequence_dimension=0, tensor_model_parallel_group=mesh)
        self.query_key_value = ColumnParallelLinear(
            config.hidden_size, 3 * config.hidden_size, gather_output=False, **shared
        )
        self.dense = RowParallelLinear(
            config.hidden_size, config.hidden_size, input_is_parallel=True, **shared
        )

    def forward(self, x: Tensor) -> Tensor:
        # (sequence / t, batch, hidden) in, (sequence, batch, 3 * hidden / t) out
        qkv = self.query_key_value(x)
        sequence, batch, _ = qkv.shape
        q, k, v = qkv.view(sequence, batch, -1, 3 * self.head_size).permute(1, 2, 0, 3).chunk(3, dim=-1)
        positions = torch.arange(sequence, device=x.device)
        q, k = (rotate(part, positions, self.rotary, self.base) for part in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        # (sequence, batch, hidden / t) in, (sequence / t, batch, hidden) out
        return self.dense(y.permute(2, 0, 1, 3).flatten(2))


class MLP(nn.Module):
    """Wide on one rank's features, narrow on its piece of the sequence."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        shared = dict(sequence_parallel_enabled=True, sequence_dimension=0, tensor_model_parallel_group=mesh)
        self.dense_h_to_4h = ColumnParallelLinear(
            config.hidden_size, config.intermediate_size, gather_output=False, **shared
        )
        self.dense_4h_to_h = RowParallelLinear(
            config.intermediate_size, config.hidden_size, input_is_parallel=True, **shared
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class Layer(nn.Module):
    """Attention and MLP side by side on the residual stream, of which each rank holds its piece of the
    sequence.
    """

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        norm = dict(
            eps=config.layer_norm_eps, sequence_parallel_enabled=True, tensor_model_parallel_group=mesh
        )
        self.input_layernorm = LayerNorm(config.hidden_size, **norm)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, **norm)
        self.attention = Attention(config, mesh)
        self.mlp = MLP(config, mesh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.input_layernorm(x)) + self.mlp(self.post_attention_layernorm(x))


class GPTNeoX(nn.Module):
    """The language model; every rank gives the same tokens and gets the same loss."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        shared = dict(sequence_parallel_enabled=True, sequence_dimension=0, tensor_model_parallel_group=mesh)
        self.gpt_neox = nn.ModuleDict(
            {
                "embed_in": ParallelEmbedding(config.vocab_size, config.hidden_size, **shared),
                "layers": nn.ModuleList(Layer(config, mesh) for _ in range(config.num_hidden_layers)),
                "final_layer_norm": LayerNorm(
                    config.hidden_size,
                    config.layer_norm_eps,
                    sequence_parallel_enabled=True,
                    tensor_model_parallel_group=mesh,
                ),
            }
        )
        self.lm_head = ColumnParallelLinear(
            config.hidden_size, config.vocab_size, bias=False, gather_output=False, **shared
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """The mean cross entropy of every next token; ``tokens`` are (batch, sequence)."""
        # this rank's piece of the sequence, from here to the output layer
        x = self.gpt_neox["embed_in"](tokens.t())
        for layer in self.gpt_neox["layers"]:  # type: ignore[union-attr]
            x = layer(x)
        # (sequence, batch, vocabulary / t), never gathered
        logits = self.lm_head(self.gpt_neox["final_layer_norm"](x))
        return parallel_cross_entropy(
            logits[:-1], tokens.t()[1:], tensor_model_parallel_group=self.mesh
        ).mean()


def batch(step: int) -> Tensor:
    """Runs of consecutive numbers, the same on every rank."""
    starts = torch.randint(256, (8, 1), generator=torch.Generator().manual_seed(step))
    return (starts + torch.arange(64)) % 256


def train(mesh: DeviceMesh, steps: int, budget: str | None = None) -> list[float]:
    """Losses of a few steps."""
    torch.manual_seed(0)  # alike on every rank: each draws the whole weights and keeps its part
    model = GPTNeoX(Config(), mesh)
    if budget is not None:
        lowtide.limit_memory(model, budget)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(step))
        loss.backward()
        allreduce_sequence_parallel_gradients(optimizer)  # norms and biases saw a piece of the sequence each
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a small GPT-NeoX, shared by the ranks that torchrun starts."
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--budget", help="peak memory of a rank's step, such as 70%% or 200MiB")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
        torch.set_default_device(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    losses = train(mesh, options.steps, options.budget)
    if dist.get_rank() == 0:
        print(f"{mesh.size()} ranks, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
