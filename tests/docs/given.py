"""What the code of a page takes for granted: a small model, its batch, an optimizer; and more by page."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig


def base() -> dict[str, Any]:
    """The names that every page has."""
    torch.manual_seed(0)
    shape = dict(layers=2, width=32, heads=2, hidden_width=64, key_value_heads=2)
    config = ModelConfig("gpt", **shape, vocabulary=64, positions=32)
    model = build_model(config)
    tokens = torch.randint(64, (16, 32))
    batch = {"tokens": tokens, "targets": tokens}
    return {
        "model": model,
        "config": config,
        "tokens": tokens,
        "batch": batch,
        "batches": [batch, batch],
        "optimizer": torch.optim.AdamW(model.parameters()),
    }


def hugging_face() -> dict[str, Any]:
    """A model of transformers instead."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    model, tokens = LlamaForCausalLM(config), torch.randint(64, (2, 32))
    batch = {"input_ids": tokens, "labels": tokens}
    optimizer = torch.optim.AdamW(model.parameters())
    return dict(model=model, config=config, tokens=tokens, batch=batch, batches=[batch], optimizer=optimizer)


def module() -> dict[str, Any]:
    """What is live in the forward of a layer."""
    layers = {name: nn.Linear(8, 8) for name in ("attn", "mlp", "block")}
    return {
        "self": SimpleNamespace(**layers, norm=nn.LayerNorm(8), norm1=nn.LayerNorm(8)),
        "h": torch.randn(4, 8, requires_grad=True),
    }


def readme() -> dict[str, Any]:
    """A step as one call, what a trainer takes, and ranks to share a model."""
    from transformers import Trainer

    names = trainers()
    names |= {"Trainer": Trainer, "training_args": names["args"], "args": ()}
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    step = lambda: names["model"](**names["batch"]).loss  # noqa: E731
    return names | module() | {"mesh": mesh, "step": step}


def trainers() -> dict[str, Any]:
    """What the trainers of others take."""
    from transformers import TrainingArguments

    names = hugging_face()
    rows = [{"input_ids": row, "labels": row} for row in names["tokens"]]
    more = dict(args=TrainingArguments("out", report_to=[], use_cpu=True), data=rows, base=names["model"])
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    return names | more | {"loader": torch.utils.data.DataLoader(rows), "mesh": mesh}


def stages() -> dict[str, Any]:
    """One process that holds every stage."""
    names = base()
    tokens = torch.randint(64, (16, 32))
    more = dict(ranks=1, rank=0, batch=2, sequence=32, tokens=tokens, targets=tokens)
    return names | more | {"group": dist.group.WORLD}


def planned() -> dict[str, Any]:
    """A model with a limit."""
    names = base()
    return names | {"handle": lowtide.limit_memory(names["model"], "600MiB")}


def shared() -> dict[str, Any]:
    """A group to shard over."""
    return base() | {"group": dist.group.WORLD}


GIVEN = {
    "README.md": readme,
    "docs/guides/lora.md": trainers,
    "docs/integrations.md": trainers,
    "docs/parallel.md": hugging_face,
    "docs/pipeline.md": stages,
    "docs/planning.md": planned,
    "docs/stores.md": shared,
    "docs/techniques.md": lambda: base() | module(),
    "docs/techniques/shards.md": shared,
}
"""By page, where that is more than `base`."""


def given(page: str) -> dict[str, Any]:
    """The names that a page's first block finds. A process group of one rank has to be there."""
    return {"torch": torch, "lowtide": lowtide} | GIVEN.get(page, base)()
