"""The models that the benchmarks run on: built-in ones and small random ones of the transformers package."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.common import Case
from lowtide.models import build_model
from lowtide.models.presets import ModelConfig


class WithLoss(torch.nn.Module):
    """A classifier and its loss in one module."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        """The loss, as an output with ``.loss``."""
        from types import SimpleNamespace

        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(self.body(x), labels))


class Bottleneck(torch.nn.Module):
    """ResNet's block with in-place activations and batch norm."""

    def __init__(self, inner: int, width: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(width, inner, 1, bias=False),
            torch.nn.BatchNorm2d(inner),
            torch.nn.ReLU(inplace=True),
            torch.nn.Conv2d(inner, inner, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(inner),
            torch.nn.ReLU(inplace=True),
            torch.nn.Conv2d(inner, width, 1, bias=False),
            torch.nn.BatchNorm2d(width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.relu(x + self.layers(x), inplace=True)


def language(name: str, batch: int, sequence: int, *, vocabulary: int = 512, **shape: Any) -> Case:
    """A built-in language model on random bytes."""
    config = ModelConfig(vocabulary=vocabulary, positions=sequence, **shape)

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return build_model(config).train()

    def data() -> dict[str, Any]:
        torch.manual_seed(1)
        tokens = torch.randint(vocabulary, (batch, sequence))
        return {"tokens": tokens, "targets": tokens}

    return Case(name, build, data)


def gpt(
    layers: int, width: int, *, batch: int = 2, sequence: int = 512, dropout: float = 0.0, fused: bool = True
) -> Case:
    """A GPT shape."""
    shape: dict[str, Any] = dict(
        family="gpt",
        layers=layers,
        width=width,
        heads=width // 64,
        hidden_width=4 * width,
        key_value_heads=width // 64,
    )
    return language(f"gpt {layers}x{width}", batch, sequence, dropout=dropout, fused_attention=fused, **shape)


def llama(layers: int, width: int, *, batch: int = 2, sequence: int = 512, dropout: float = 0.0) -> Case:
    """A Llama shape with grouped-query attention."""
    hidden = (8 * width // 3 + 63) // 64 * 64
    shape: dict[str, Any] = dict(
        family="llama",
        layers=layers,
        width=width,
        heads=width // 64,
        hidden_width=hidden,
        key_value_heads=max(1, width // 128),
    )
    return language(f"llama {layers}x{width}", batch, sequence, dropout=dropout, **shape)


def resnet(blocks: int = 8, width: int = 192) -> Case:
    """Bottleneck blocks with batch norm."""

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        body = [Bottleneck(width // 4, width) for _ in range(blocks)]
        head = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10)]
        return WithLoss(torch.nn.Sequential(torch.nn.Conv2d(3, width, 3, padding=1), *body, *head)).train()

    def data() -> dict[str, Any]:
        torch.manual_seed(1)
        return {"x": torch.randn(4, 3, 40, 40), "labels": torch.randint(10, (4,))}

    return Case(f"resnet {blocks} blocks", build, data)


def _hugging_face(name: str, model: str, config: str, values: dict[str, Any], batch: Any) -> Case:
    def build() -> torch.nn.Module:
        import transformers

        torch.manual_seed(0)
        return getattr(transformers, model)(getattr(transformers, config)(**values)).train()

    return Case(name, build, batch)


def gpt2(dropout: float = 0.0, size: int = 4, layers: int = 8, width: int = 512) -> Case:
    """GPT-2 of transformers. Its loss is a graph of its own under ``torch.compile``."""

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(4096, (size, 256))
        return {"input_ids": ids, "labels": ids}

    values = dict(
        vocab_size=4096,
        n_positions=256,
        n_embd=width,
        n_layer=layers,
        n_head=width // 64,
        embd_pdrop=dropout,
        resid_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    return _hugging_face(f"gpt2 {layers}x{width}", "GPT2LMHeadModel", "GPT2Config", values, batch)


def llama3(dropout: float = 0.0, size: int = 4, layers: int = 8, width: int = 512) -> Case:
    """Llama of transformers, with grouped-query attention."""

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(4096, (size, 256))
        return {"input_ids": ids, "labels": ids}

    values = dict(
        vocab_size=4096,
        hidden_size=width,
        intermediate_size=(8 * width // 3 + 63) // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        max_position_embeddings=256,
        attention_dropout=dropout,
        use_cache=False,
    )
    return _hugging_face(f"llama3 {layers}x{width}", "LlamaForCausalLM", "LlamaConfig", values, batch)


def bert(dropout: float = 0.1, size: int = 2, layers: int = 4, width: int = 384) -> Case:
    """An encoder, with dropout."""

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(1000, (size, 192))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}

    values = dict(
        vocab_size=1000,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _hugging_face(f"bert {layers}x{width}", "BertForMaskedLM", "BertConfig", values, batch)


def t5(dropout: float = 0.1, size: int = 2, layers: int = 3, width: int = 320, cache: bool = True) -> Case:
    """An encoder and a decoder, with dropout.

    Args:
        dropout, size, layers, width: of the model and its batch.
        cache: it returns keys and values, too. Under ``torch.compile`` backward takes zeros for each of them.
    """

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(1000, (size, 160))
        return {"input_ids": ids, "labels": ids}

    values = dict(
        vocab_size=1000,
        d_model=width,
        d_kv=64,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=width // 64,
        decoder_start_token_id=0,
        dropout_rate=dropout,
        use_cache=cache,
    )
    return _hugging_face(
        f"t5 {layers}+{layers}x{width}", "T5ForConditionalGeneration", "T5Config", values, batch
    )


def vit(dropout: float = 0.0, size: int = 3, layers: int = 4, width: int = 384) -> Case:
    """A vision transformer."""

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        return {"pixel_values": torch.randn(size, 3, 96, 96), "labels": torch.randint(10, (size,))}

    values = dict(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        image_size=96,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return _hugging_face(f"vit {layers}x{width}", "ViTForImageClassification", "ViTConfig", values, batch)


def mixture(dropout: float = 0.0, size: int = 4, layers: int = 4, width: int = 256) -> Case:
    """A mixture of experts, two of four for each token."""

    def batch() -> dict[str, Any]:
        torch.manual_seed(1)
        ids = torch.randint(1000, (size, 256))
        return {"input_ids": ids, "labels": ids}

    values = dict(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        attention_dropout=dropout,
        output_router_logits=True,
        use_cache=False,
    )
    return _hugging_face(f"mixture {layers}x{width}", "MixtralForCausalLM", "MixtralConfig", values, batch)


def of_the_curve(tiny: bool = False) -> list[Case]:
    """The models of `budget_curve`: each without dropout, and with it where the model has any.

    Args:
        tiny: two layers of each, on which everything runs in seconds.
    """
    text: dict[str, Any] = dict(batch=2, sequence=64) if tiny else dict(batch=4, sequence=256)
    deep = (2, 128) if tiny else (8, 512)
    small: dict[str, Any] = dict(size=1, layers=2, width=128) if tiny else {}

    def made(dropout: float) -> list[Case]:
        return [
            gpt(*deep, **text, dropout=dropout),
            llama(*deep, **text, dropout=dropout),
            bert(dropout, **{"size": 6, **small}),
            vit(dropout, **{"size": 8, **small}),
            t5(dropout, **{"size": 6, **small}, cache=False),
            mixture(dropout, **small),
        ]

    labelled = [gpt2(**small), llama3(**small)]  # the others of transformers are above
    plain = [*made(0.0), resnet(2, 32) if tiny else resnet(), *labelled]
    return plain + [replace(case, name=f"{case.name}, dropout") for case in made(0.1)]


def six() -> list[Case]:
    """One of each kind, so small that a step takes half a second on one core and forty pairs fit in a
    minute.
    """
    return [gpt(4, 384, batch=1, dropout=0.1), llama(4, 384, batch=1), bert(), t5(), vit(), resnet()]
