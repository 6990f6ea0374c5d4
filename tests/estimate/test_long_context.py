"""Context parallelism's exchanges, tiles of the MLP and the loss, and attention of long sequences."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.estimate import Config, EstimateError, configure, estimate
from lowtide.estimate.devices import device
from lowtide.estimate.flops import iteration_flops, layer_flops
from lowtide.estimate.layer import layer_terms
from lowtide.estimate.simulation import simulate
from lowtide.estimate.speed import efficiencies, step_time
from lowtide.estimate.traffic import stage_traffic
from lowtide.estimate.working import backward_moments, exchanged, kernel_scratch
from lowtide.meter import available

T, Q, KV, L = 16384, 4096, 1024, 32
"""Tokens of one of eight ranks at 128k, and Llama-3 8B's widths and layers."""


def llama(**changes: Any) -> Config:
    usual: dict[str, Any] = dict(seq=131072, cp=8, zero=3, dtype="bf16-true", recompute="full")
    return configure("llama3-8b", **(usual | changes))


@pytest.mark.parametrize(
    ("exchange", "live", "sent"),
    [
        ("ring", T * 2 * KV * (2 * 2 + 2 * 4), 4 * 7 * T * 2 * KV * 2),
        ("all-gather", T * 2 * KV * 2 * 7 * 2, 4 * 7 * T * 2 * KV * 2),
        ("all-to-all", T * (Q + 2 * KV) * 2, 3 * T * (2 * Q + 2 * KV) * 2 * 7 // 8),
    ],
)
def test_exchanges(exchange: Any, live: int, sent: int) -> None:
    """Bytes in attention's backward, and sent by a rank: forward, again, and backward with gradients."""
    config = llama(cp_exchange=exchange)
    assert exchanged(config) == live
    found = {item.link: item.bytes for item in stage_traffic(config, 0)}
    assert found["context"] == L * sent
    assert exchanged(llama(cp=1, dp=8)) == 0


def test_all_to_all_is_not_hidden_behind_attention() -> None:
    ring, ulysses = (step_time(llama(cp_exchange=way), device("h100")) for way in ("ring", "all-to-all"))
    assert ring.context == 0 < ulysses.context
    with pytest.raises(EstimateError, match="--cp=64: it has to divide the 32 heads"):
        llama(cp=64, cp_exchange="all-to-all")
    with pytest.raises(EstimateError, match="--cp-exchange=all-gather with --cp=1"):
        llama(cp=1, dp=8, cp_exchange="all-gather")


class Tiled(torch.autograd.Function):
    """SwiGLU tile by tile: forward keeps its input, backward runs a tile forward again and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, tiles: int) -> Tensor:
        ctx.save_for_backward(x, gate, up, down)
        ctx.tiles = tiles
        return torch.cat([mlp(piece, gate, up, down) for piece in x.chunk(tiles)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, gate, up, down = ctx.saved_tensors
        found = torch.empty_like(x)
        for piece, given, out in zip(
            x.chunk(ctx.tiles), gradient.chunk(ctx.tiles), found.chunk(ctx.tiles), strict=True
        ):
            with torch.enable_grad():
                leaf = piece.detach().requires_grad_()
                mlp(leaf, gate.detach(), up.detach(), down.detach()).backward(given)
            out.copy_(leaf.grad)  # type: ignore[arg-type]
        return found, None, None, None, None


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize("tiles", [4, 16])
def test_a_tile_takes_what_pytorch_takes(tiles: int) -> None:
    """The peak of a tiled MLP's backward above its input and the gradient of its output."""
    tokens, hidden, inner = 2048, 64, 1024
    shape: dict[str, Any] = dict(layers=1, hidden=hidden, heads=4, ffn=inner, mlp="swiglu", dtype="fp32")
    config = configure(**shape, norm="rmsnorm", seq=tokens, tiles=tiles, unfused_mlp=True)
    x = torch.randn(tokens, hidden, requires_grad=True)
    weights = [torch.randn(hidden, inner), torch.randn(hidden, inner), torch.randn(inner, hidden)]
    out = Tiled.apply(x, *weights, tiles)
    given = torch.randn_like(out)
    taken = lowtide.measure(lambda: torch.autograd.grad(out, x, given)).peak_bytes
    stream = 2 * 4 * tokens * hidden  # of the residual and the branch, which are not made here
    counted = backward_moments(config)["tile of the MLP"] - stream
    assert taken == pytest.approx(float(counted), rel=0.06)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_simulate_traces_tiles(recompute: str) -> None:
    """lowtide.tile of the project's own MLP: what a layer keeps falls by as much as the formula says, and the
    peak, too; of recomputed layers within a third, since the trace has norms in separate operations.
    """
    shape: dict[str, Any] = dict(
        layers=2, hidden=256, heads=4, ffn=1024, vocab=512, mlp="swiglu", norm="rmsnorm", unfused_mlp=True,
        dtype="fp32", seq=4096, recompute=recompute,
    )  # fmt: skip
    plain, tiled = (simulate(configure(**shape, tiles=tiles)).stages[0] for tiles in (1, 4))
    tensor = 4 * 4096 * 256
    if recompute == "none":
        freed = plain.timeline.held_bytes - tiled.timeline.held_bytes
        closed = plain.closed.activations_bytes - tiled.closed.activations_bytes
        assert freed == closed == 2 * 4 * 4 * tensor  # gate, up, silu(gate) and their product, each 4 wide
    lower = plain.timeline.activation_peak_bytes - tiled.timeline.activation_peak_bytes
    counted = plain.closed.activation_peak_bytes - tiled.closed.activation_peak_bytes
    assert counted > 0 and lower == pytest.approx(counted, rel=0.01 if recompute == "none" else 0.35)
    with pytest.raises(EstimateError, match=r"--tiles=4: lowtide\.tile of the project's own MLP"):
        simulate(configure(**shape, tiles=4, tp=2))
    with pytest.raises(EstimateError, match="--head-chunks=4: the project's own attention"):
        simulate(configure(**(shape | dict(attention="fused")), head_chunks=4))


def test_tiles_keep_the_mlp_s_input_only() -> None:
    """Of a layer, of a recomputed one at work, and of a chunked loss as many pieces."""
    plain, tiled = (llama(recompute="none", tiles=tiles) for tiles in (1, 16))
    freed = sum(term.bytes for term in layer_terms(plain)) - sum(term.bytes for term in layer_terms(tiled))
    assert freed == 3 * 2 * T * 14336
    whole, pieces = (estimate(llama(loss="chunked", tiles=tiles)) for tiles in (1, 16))
    assert (whole.loss["pieces"], pieces.loss["pieces"]) == (8, 16)
    assert pieces.moments["backward"] < whole.moments["backward"] - 3 * 2 * T * 14336
    again = iteration_flops(llama(tiles=16)).executed - iteration_flops(llama()).executed
    assert again == L * 2 * 131072 * 3 * 4096 * 14336 < L * layer_flops(llama(), 1)
    with pytest.raises(EstimateError, match="--tiles=4: it is for the MLP of a dense model"):
        configure("mixtral-8x7b", tiles=4)


def test_heads_of_keys_are_held_by_several_ranks_where_heads_are_exchanged() -> None:
    """8 heads of keys on 32 ranks: each is on 4, for the kernel and on its way; a ring has none twice."""
    for way, copies in (("all-to-all", 4), ("ring", 1)):
        config = llama(cp=32, cp_exchange=way, recompute="none")
        kept = {term.name: term.bytes for term in layer_terms(config)}
        tokens = 131072 // 32
        assert config.key_copies == copies
        assert kept["keys"] == kept["values"] == copies * 2 * tokens * KV
        assert ("output of attention before its exchange" in kept) == (way == "all-to-all")
        keys = 2 * copies * tokens * KV
        sent = {item.link: item.bytes for item in stage_traffic(config, 0)}["context"]
        assert sent == L * (2 * 2 * (2 * tokens * Q + keys) * 31 // 32 if copies > 1 else 3 * 2 * 31 * keys)


@pytest.mark.parametrize(
    ("settings", "counted"),
    [
        (dict(), 4 * Q + 2 * 2 * Q),  # FlashAttention 2: float32 for queries, and keys' for each head
        (dict(attention="flash-3"), 4 * Q + 2 * 4 * KV),  # in float32 for each head of keys
        (dict(cp_exchange="all-to-all"), 4 * Q + 2 * 2 * Q),  # 4 heads a rank share one of keys
        (dict(cp_exchange="all-to-all", cp=32), 4 * Q),  # a head of keys for each head
    ],
)
def test_an_attention_kernel_s_own_memory_in_backward(settings: dict[str, Any], counted: int) -> None:
    config = llama(**settings)
    assert kernel_scratch(config) == config.tokens * counted


def test_slices_of_heads_keep_attention_s_input_and_output() -> None:
    """UPipe: queries, keys and values of a slice are made again in backward, and exchanged again."""
    whole, slices = (
        llama(cp_exchange="all-to-all", tiles=4, head_chunks=n, recompute="none") for n in (1, 4)
    )
    gone = {term.name for term in layer_terms(whole)} - {term.name for term in layer_terms(slices)}
    assert gone == {"queries", "keys", "values", "output of attention before its exchange"}
    mlp = sum(term.bytes for term in layer_terms(slices) if term.part == "mlp")
    live = backward_moments(slices)["attention core, slice by slice"] + mlp
    slice_ = 2 * 2 * (Q + 2 * KV + Q) + 4 * Q + 2 * 2 * Q
    assert live == T * (2 * Q + 2 * 2 * Q + Fraction(slice_, 4))  # the stream's, the output's, the input's
    again = iteration_flops(slices).executed - iteration_flops(whole).executed
    assert again == L * 2 * 131072 * Q * (Q + 2 * KV)
    one, four = ({item.link: item.bytes for item in stage_traffic(way, 0)} for way in (whole, slices))
    assert four["context"] == one["context"] * 3 // 2
    for settings, told in (
        (dict(head_chunks=3), "--head-chunks=3: it has to divide the 32 heads"),
        (dict(head_chunks=8, cp_exchange="all-to-all"), "the 4 heads that a rank works on"),
        (dict(head_chunks=4), "--cp-exchange all-to-all where there is --cp"),
    ):
        with pytest.raises(EstimateError, match=told):
            llama(**settings)


@pytest.mark.skipif(not available(), reason="needs the counting allocator")
@pytest.mark.parametrize(("wide", "tensors"), [("second", 1), ("first", 2)])
def test_a_layer_that_runs_to_its_end_keeps_its_output_and_its_gradient(wide: str, tensors: int) -> None:
    """Of the second half of a layer nothing but the output; of the first the gradient that came in, too."""
    tokens, hidden = 2048, 64
    sizes = {"first": (256, 64), "second": (64, 256)}[wide]
    halves = [
        [torch.randn(hidden, inner, requires_grad=True), torch.randn(inner, hidden, requires_grad=True)]
        for inner in sizes
    ]

    def layer(x: Tensor) -> Tensor:
        for up, down in halves:
            x = x + torch.relu(x @ up) @ down
        return x

    def step(ends: bool) -> None:
        x = torch.randn(tokens, hidden, requires_grad=True)
        given = torch.ones(tokens, hidden)
        torch.autograd.backward(checkpoint(layer, x, use_reentrant=ends) * 1.0, given)
        for weight in (weight for half in halves for weight in half):
            weight.grad = None

    ends, stops = (lowtide.measure(lambda way=way: step(way)).peak_bytes for way in (True, False))
    assert ends - stops == tensors * 4 * tokens * hidden
    usual: dict[str, Any] = dict(layers=1, hidden=hidden, heads=4, seq=tokens, dtype="fp32", recompute="full",
                                 attention="fused", dropout=0.0)  # fmt: skip
    there, gone = (backward_moments(configure(**usual, reentrant=way)) for way in (True, False))
    name = {"first": "q, k, v projection", "second": "activation of the MLP"}[wide]
    assert there[name] - gone[name] == ends - stops


def test_attention_on_hopper_nears_its_ceiling_with_longer_sequences() -> None:
    """A kernel's share of the peak: the fitted one up to 8,192 tokens, the ceiling far beyond."""
    known = efficiencies()["h100"]

    def share(seq: int) -> float:
        config = configure("llama3-8b", seq=seq, attention="flash-3", recompute="full")
        flops = 4.5 * 32 * 4 * seq**2 * 4096
        return flops / step_time(config, device("h100")).attention / 989e12

    short = known.attention * known.flash_3
    assert share(4096) == pytest.approx(short) and share(8192) == pytest.approx(short)
    assert short < share(65536) < share(1 << 20) < known.ceiling
    assert share(1 << 24) == pytest.approx(known.ceiling, rel=1e-3)
