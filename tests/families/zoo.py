"""One small model with random weights for each family, and a batch for it. Importing this costs nothing;
building one imports its model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Batch = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        name: what it is called in test ids.
        build: makes the model and a batch; called under a fixed seed.
        traced: how its step is traced, fake tensors or a real step.
        accuracy: how near the predicted peak has to be to the measured one.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Batch]]
    traced: str = "fake"
    accuracy: float = 0.01


class WithLoss(nn.Module):
    """A model without a loss of its own, as transformers' models have one."""

    def __init__(self, body: nn.Module, loss: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self.loss = loss

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        from transformers.utils import ModelOutput

        output = self.body(x)
        return ModelOutput(loss=self.loss(output, labels), logits=output)


def _ids(vocabulary: int, batch: int, length: int) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length))


def _tokens(vocabulary: int = 120, batch: int = 4, length: int = 48) -> Batch:
    ids = _ids(vocabulary, batch, length)
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> tuple[nn.Module, Batch]:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=120, n_positions=64, n_embd=48, n_layer=3, n_head=3)
    ), _tokens()


def llama() -> tuple[nn.Module, Batch]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=120, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
        attention_dropout=0.1, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens()


def gpt_neox() -> tuple[nn.Module, Batch]:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=120, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        hidden_dropout=0.1,
        attention_dropout=0.1, max_position_embeddings=64,
    )  # fmt: skip
    return GPTNeoXForCausalLM(config), _tokens()


def _bert(dropout: float) -> tuple[nn.Module, Batch]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=120, hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, max_position_embeddings=64,
    )  # fmt: skip
    batch = _tokens()
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, 30:] = 0
    return BertForMaskedLM(config), batch


def bert() -> tuple[nn.Module, Batch]:
    return _bert(0.1)


def bert_without_dropout() -> tuple[nn.Module, Batch]:
    return _bert(0.0)


def deberta() -> tuple[nn.Module, Batch]:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=120, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"], max_position_embeddings=64, num_labels=3,
    )  # fmt: skip
    return DebertaV2ForSequenceClassification(config), {
        "input_ids": _ids(120, 4, 32),
        "labels": torch.randint(0, 3, (4,)),
    }


def t5() -> tuple[nn.Module, Batch]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=120, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config), {"input_ids": _ids(120, 4, 40), "labels": _ids(120, 4, 24)}


def bart() -> tuple[nn.Module, Batch]:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=120, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, max_position_embeddings=64, attention_dropout=0.1,
        activation_dropout=0.1,
    )  # fmt: skip
    return BartForConditionalGeneration(config), {"input_ids": _ids(120, 4, 40), "labels": _ids(120, 4, 24)}


def vit() -> tuple[nn.Module, Batch]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, image_size=32,
        patch_size=4, num_labels=10,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.randint(0, 10, (4,)),
    }


def swin() -> tuple[nn.Module, Batch]:
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=24, depths=[2, 2], num_heads=[2, 4], window_size=4,
        num_labels=10, drop_path_rate=0.2,
        hidden_dropout_prob=0.1,
    )  # fmt: skip
    return SwinForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 32, 32),
        "labels": torch.randint(0, 10, (4,)),
    }


def resnet() -> tuple[nn.Module, Batch]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48], depths=[2, 2, 1], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 48, 48),
        "labels": torch.randint(0, 10, (4,)),
    }


def regnet() -> tuple[nn.Module, Batch]:
    from transformers import RegNetConfig, RegNetForImageClassification

    config = RegNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], groups_width=8, layer_type="y", num_labels=10
    )
    return RegNetForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 48, 48),
        "labels": torch.randint(0, 10, (4,)),
    }


def convnext() -> tuple[nn.Module, Batch]:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, drop_path_rate=0.2, num_labels=10
    )
    return ConvNextForImageClassification(config), {
        "pixel_values": torch.randn(4, 3, 48, 48),
        "labels": torch.randint(0, 10, (4,)),
    }


def convolutions() -> tuple[nn.Module, Batch]:
    layers: list[nn.Module] = []
    for wide, to in ((3, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv2d(wide, to, 3, padding=1),
            nn.BatchNorm2d(to),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
        ]
    body = nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 12 * 12, 10))
    return WithLoss(body, functional.cross_entropy), {
        "x": torch.randn(4, 3, 24, 24),
        "labels": torch.randint(0, 10, (4,)),
    }


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()

        def block(wide: int, to: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(wide, to, 3, padding=1), nn.GroupNorm(4, to), nn.SiLU(inplace=True),
                nn.Conv2d(to, to, 3, padding=1), nn.InstanceNorm2d(to, affine=True,
                    track_running_stats=True), nn.LeakyReLU(0.1, inplace=True),
            )  # fmt: skip

        self.down = nn.ModuleList([block(3, 16), block(16, 32)])
        self.middle = block(32, 32)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(32, 32, 2, stride=2), nn.ConvTranspose2d(32, 16, 2, stride=2)]
        )
        self.join = nn.ModuleList([block(64, 32), block(32, 16)])
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), skips.pop()], dim=1))
        return self.head(functional.interpolate(x, scale_factor=1.5, mode="bilinear"))


def unet() -> tuple[nn.Module, Batch]:
    return WithLoss(_UNet(), functional.mse_loss), {
        "x": torch.randn(2, 3, 32, 32),
        "labels": torch.randn(2, 3, 48, 48),
    }


def mamba() -> tuple[nn.Module, Batch]:
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(
        vocab_size=120, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4, use_cache=False
    )
    return MambaForCausalLM(config), _tokens(length=8)


def mixtral() -> tuple[nn.Module, Batch]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, attention_dropout=0.1, output_router_logits=True,
        max_position_embeddings=64,
    )  # fmt: skip
    return MixtralForCausalLM(config), _tokens()


def wav2vec2() -> tuple[nn.Module, Batch]:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=32, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        conv_dim=(24, 24),
        conv_kernel=(8, 4), conv_stride=(8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0, layerdrop=0.0,
        ctc_loss_reduction="mean",
    )  # fmt: skip
    return Wav2Vec2ForCTC(config), {
        "input_values": torch.randn(2, 1600),
        "labels": torch.randint(1, 32, (2, 10)),
    }


def whisper() -> tuple[nn.Module, Batch]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=120, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=32,
        max_target_positions=32, dropout=0.1,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
        begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(2, 16, 64),
        "labels": _ids(120, 2, 20),
    }


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(120, 32)
        self.layers = kind(32, 48, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(96, 120)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(x))[0])


def _per_token(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm() -> tuple[nn.Module, Batch]:
    return WithLoss(_Recurrent(nn.LSTM), _per_token), {"x": _ids(120, 4, 24), "labels": _ids(120, 4, 24)}


def gru() -> tuple[nn.Module, Batch]:
    return WithLoss(_Recurrent(nn.GRU), _per_token), {"x": _ids(120, 16, 8), "labels": _ids(120, 16, 8)}


def clip() -> tuple[nn.Module, Batch]:
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": 120,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    text |= {"max_position_embeddings": 32, "eos_token_id": 2, "attention_dropout": 0.1}
    vision = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
    return model, {
        "input_ids": _ids(120, 4, 20),
        "pixel_values": torch.randn(4, 3, 32, 32),
        "return_loss": True,
    }


FAMILIES: tuple[Family, ...] = (
    Family("gpt2", gpt2),
    Family("llama", llama),
    Family("gpt_neox", gpt_neox),
    Family("bert", bert),
    Family("bert_without_dropout", bert_without_dropout),
    Family("deberta", deberta),
    Family("t5", t5),
    Family("bart", bart),
    Family("vit", vit),
    Family("swin", swin),
    Family("resnet", resnet),
    Family("regnet", regnet),
    Family("convnext", convnext),
    Family("convolutions", convolutions, accuracy=0.02),  # what its replays start from goes sooner
    Family("unet", unet),
    Family("mamba", mamba),
    Family("mixtral", mixtral),
    Family("wav2vec2", wav2vec2),
    Family("whisper", whisper),
    Family("lstm", lstm, traced="real"),
    Family("gru", gru),
    Family("clip", clip),
)
