"""The built-in models: sizes against published numbers, numbers against Hugging Face's own code, and what
they refuse.
"""

from __future__ import annotations

import math

import pytest
import torch

from lowtide.extensions.tiles.loss import in_pieces
from lowtide.models import PRESETS, ModelError, build_model, preset
from lowtide.models.common import CausalAttention, Dropout, next_token_loss

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-160m": 162_417_408,
    "llama-1b": 1_235_814_400,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
}
SMALL = ["gpt-nano", "llama-nano"]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_as_many_parameters_as_it_says(name: str) -> None:
    with torch.device("meta"):
        model = build_model(name)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == PRESETS[name].parameters()
    assert PUBLISHED.get(name, count) == count


def test_gpt3_has_the_parameters_of_its_formula() -> None:
    """12 L h^2 (1 + 13 / 12h) + (v + s) h, to which the last norm adds 2h."""
    h, layers, v, s = 12288, 96, 51200, 2048
    assert preset("gpt3-175b").parameters() == layers * (12 * h * h + 13 * h) + (v + s) * h + 2 * h


@pytest.mark.parametrize("name", SMALL)
def test_an_untrained_model_knows_nothing_and_learns(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name)
    tokens = torch.randint(256, (4, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)
    assert losses[-1] < 1.0


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("fused", [True, False])
def test_no_token_sees_the_future(name: str, fused: bool) -> None:
    torch.manual_seed(0)
    model = build_model(preset(name, fused_attention=fused))
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(tokens).logits, model(changed).logits
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


@pytest.mark.parametrize("name", SMALL)
def test_fused_and_unfused_attention_agree(name: str) -> None:
    tokens = torch.randint(256, (2, 16))
    logits = []
    for fused in (True, False):
        torch.manual_seed(0)
        logits.append(build_model(preset(name, fused_attention=fused))(tokens).logits)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
@pytest.mark.parametrize("ignored", [[], [3], [0, 5, 6, 7, 8, 19], range(19)])
def test_a_loss_in_chunks_is_the_same_loss(chunks: int, ignored: list[int]) -> None:
    """The mean over the targets that count, as PyTorch has it, also where a whole piece is ignored."""
    torch.manual_seed(0)
    hidden, head = (
        torch.randn(2, 10, 8, dtype=torch.float64, requires_grad=True),
        torch.nn.Linear(8, 50, dtype=torch.float64),
    )
    targets = torch.randint(50, (2, 10))
    targets.view(-1)[list(ignored)] = -100
    expected = torch.nn.functional.cross_entropy(
        head(hidden).flatten(0, 1), targets.flatten(), ignore_index=-100
    )
    head = in_pieces(head, chunks)
    found = next_token_loss(hidden, head, targets)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=0)
    inputs = (hidden, head.weight)
    for one, other in zip(
        torch.autograd.grad(expected, inputs), torch.autograd.grad(found, inputs), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_dropout_keeps_one_byte_an_element_and_its_mean() -> None:
    torch.manual_seed(0)
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    x = torch.ones(1000, 100, requires_grad=True)
    dropout = Dropout(0.25)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = dropout(x)
    assert [tensor.element_size() for tensor in saved] == [1]
    assert y.mean().item() == pytest.approx(1.0, abs=0.02)
    assert dropout.eval()(x) is x


def test_dropout_reaches_the_attention_weights() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 4).unbind()
    attention = CausalAttention(dropout=0.5, fused=True)
    assert not torch.allclose(attention(q, k, v), attention(q, k, v))
    attention.eval()
    assert torch.equal(attention(q, k, v), attention(q, k, v))


def test_with_targets_no_logits_are_held() -> None:
    tokens = torch.randint(256, (1, 8))
    output = build_model("gpt-nano")(tokens, tokens)
    assert output.logits is None
    assert output.loss is not None


@pytest.mark.parametrize("name", SMALL)
def test_bf16_autocast_gives_a_float32_loss(name: str) -> None:
    tokens = torch.randint(256, (1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        loss = build_model(name)(tokens, tokens).loss
    assert loss.dtype == torch.float32
    loss.backward()


def test_gpt_computes_what_hugging_face_gpt2_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = build_model("gpt-nano").eval()
    config = transformers.GPT2Config(vocab_size=256, n_positions=1024, n_embd=64, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    names = {
        "tokens": "wte",
        "positions": "wpe",
        "norm": "ln_f",
        "blocks": "h",
        "norm1": "ln_1",
        "norm2": "ln_2",
        "attention": "attn",
    }
    names |= {"qkv": "c_attn", "out": "c_proj", "up": "c_fc", "down": "c_proj"}
    state = {}
    for name, tensor in ours.state_dict().items():
        parts = [names.get(part, part) for part in name.split(".")]
        # GPT-2 stores its matrices transposed
        matrix = any(part.startswith("c_") for part in parts) and parts[-1] == "weight"
        state["lm_head.weight" if parts[0] == "head" else "transformer." + ".".join(parts)] = (
            tensor.T if matrix else tensor
        )
    theirs.load_state_dict(state)
    tokens = torch.randint(256, (2, 24))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-4)
    assert ours(tokens[:, :-1], tokens[:, 1:]).loss.item() == pytest.approx(
        theirs(tokens, labels=tokens).loss.item(), abs=1e-5
    )


def test_llama_computes_what_hugging_face_llama_computes() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = build_model("llama-nano").eval()
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    names = {
        "tokens": "embed_tokens",
        "blocks": "layers",
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
    }
    names |= {"attention": "self_attn", "q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "o_proj"}
    names |= {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    state = {}
    for name, tensor in ours.state_dict().items():
        parts = [names.get(part, part) for part in name.split(".")]
        state["lm_head.weight" if parts[0] == "head" else "model." + ".".join(parts)] = tensor
    theirs.load_state_dict(state)
    tokens = torch.randint(256, (2, 24))
    torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers=0"),
        ({"heads": 3}, "does not divide into heads=3"),
        ({"dropout": 1.0}, r"dropout=1\.0"),
        ({"key_value_heads": 1}, "use a llama preset"),
        ({"depth": 3}, "no setting 'depth'"),
    ],
)
def test_a_shape_that_does_not_hold_together_says_why(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        preset("gpt-nano", **changes)


def test_odd_rotary_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="even head width"):
        preset("llama-nano", width=60, heads=4)


@pytest.mark.parametrize("name", SMALL)
def test_tokens_of_a_wrong_shape_are_refused(name: str) -> None:
    model = build_model(preset(name, positions=16))
    with pytest.raises(ModelError, match="17 tokens is longer than the model's 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ModelError, match=r"\(batch, sequence\), not \(8,\)"):
        model(torch.zeros(8, dtype=torch.long))
