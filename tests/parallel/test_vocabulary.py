"""Embedding and cross entropy over a shared vocabulary, on real processes, against ``torch.nn.functional`` on
the whole one.
"""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks, seeded
from torch import Tensor
from torch.nn import functional as F

from lowtide import parallel as lp
from lowtide.parallel.partition import partition

pytestmark = on_each_backend
VOCABULARY, WIDTH, SEQUENCE, BATCH = 12, 8, 8, 3


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> bool:
    return (
        a.shape == b.shape
        and a.dtype is b.dtype
        and float((a - b).double().norm()) <= tolerance * max(1e-30, float(b.double().norm()))
    )


def whole(local: Tensor, dimension: int, length: int) -> Tensor:
    local = local.to_dense() if local.is_sparse else local
    if dist.get_world_size() == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local.contiguous())
    return torch.cat(parts, dimension).narrow(dimension, 0, length)


def embeddings() -> list[str]:
    faults = []
    t = dist.get_world_size()
    kinds: list[dict[str, Any]] = [
        {},
        {"padding_idx": 0},
        {"padding_idx": 7},
        {"padding_idx": -1},
        {"scale_grad_by_freq": True},
        {"sparse": True},
    ]
    kinds += [{"max_norm": 1.0}, {"max_norm": 1.0, "norm_type": 1.0, "padding_idx": 3}]
    cells = list(itertools.product(kinds, (False, True), (None, 0, 1), (False, True), (torch.float64,)))
    cells += list(itertools.product(kinds, (False, True), (1,), (True,), (torch.float32, torch.bfloat16)))
    for kind, features, sequence, odd, dtype in cells[:: 5 if t == 4 else 1]:  # 5 divides no dimension
        if features and "max_norm" in kind:
            continue
        tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
        size, width = (VOCABULARY - odd, WIDTH) if not features else (VOCABULARY, WIDTH - odd)
        torch.manual_seed(3)
        layer = lp.ParallelEmbedding(
            size, width, dtype=dtype, shard_across_embedding=features, pad=bool(odd),
            sequence_parallel_enabled=sequence is not None,
            sequence_dimension=sequence, **kind,
        )  # fmt: skip
        cut = int(features)
        length = (size, width)[cut]
        rival = torch.nn.Embedding(size, width, dtype=dtype, **kind)
        rival.weight.data = whole(layer.weight.data, cut, length).clone()
        shape = (SEQUENCE, BATCH) if sequence != 1 else (BATCH, SEQUENCE)
        tokens = torch.randint(size, shape, generator=seeded(5))
        gradient = torch.randn(*shape, width, dtype=torch.float64, generator=seeded(6)).to(dtype)
        out = layer(tokens)
        if sequence is not None:
            assert out.shape[sequence] == SEQUENCE // t
            out = lp.gather_from_sequence_parallel_region(out, sequence, to_model_parallel=False)
        expected = rival(tokens)
        out.backward(gradient)
        expected.backward(gradient)
        assert layer.weight.grad is not None and rival.weight.grad is not None
        label = f"{kind} features={features} sequence={sequence} odd={odd} {dtype}"
        if kind.get("sparse") and layer.weight.grad.is_sparse != rival.weight.grad.is_sparse:
            faults.append(f"{label}: not sparse")
        dense = rival.weight.grad.to_dense() if rival.weight.grad.is_sparse else rival.weight.grad
        if not close(out.detach(), expected.detach(), tolerance):
            faults.append(f"{label}: output")
        if not close(whole(layer.weight.grad, cut, length), dense, tolerance):
            faults.append(f"{label}: gradient")
        if not close(whole(layer.weight.data, cut, length), rival.weight.data, tolerance):
            faults.append(f"{label}: weight after the look-up")
    return faults


def losses() -> list[str]:
    faults = []
    group = lp.tensor_group()
    t = group.size
    for smoothing, odd, dtype in itertools.product(
        (0.0, 0.1), (0, 1, 3), (torch.float64, torch.float32, torch.bfloat16)
    ):
        size = VOCABULARY - odd
        where = partition((size,), 0, group, pad=True)
        ((start, stop),) = where.slices()
        generator = seeded(9)
        logits = (5 * torch.randn(SEQUENCE, BATCH, size, generator=generator, dtype=torch.float64)).to(dtype)
        target = torch.randint(size, (SEQUENCE, BATCH), generator=generator)
        target[2, 1] = target[5, 0] = -100
        scale = torch.rand(SEQUENCE, BATCH, generator=generator, dtype=torch.float64)
        # padding must not matter, whatever it holds
        mine = torch.full((SEQUENCE, BATCH, where.padded // t), 3.0, dtype=dtype)
        mine[..., : stop - start] = logits[..., start:stop]
        mine.requires_grad_()
        other = logits.clone().requires_grad_()
        loss = lp.parallel_cross_entropy(mine, target, smoothing, vocabulary=size)
        wide = torch.promote_types(dtype, torch.float32)
        expected = F.cross_entropy(
            other.to(wide).flatten(0, 1), target.flatten(), reduction="none", label_smoothing=smoothing
        ).view(target.shape)
        (loss * scale).sum().backward()
        (expected * scale).sum().backward()
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
        assert mine.grad is not None and other.grad is not None
        label = f"smoothing={smoothing} odd={odd} {dtype}"
        if not close(loss.detach(), expected.detach(), tolerance):
            faults.append(f"{label}: loss")
        if (
            not close(mine.grad[..., : stop - start], other.grad[..., start:stop], tolerance)
            or mine.grad[..., stop - start :].any()
        ):
            faults.append(f"{label}: gradient")
    return faults


def logprobs() -> list[str]:
    """Of the next tokens, in float64, with and without gradients."""
    faults = []
    for odd in (0, 1, 3):
        size = VOCABULARY - odd
        where = partition((size,), 0, lp.tensor_group(), pad=True)
        ((start, stop),) = where.slices()
        generator = seeded(10)
        logits = 5 * torch.randn(BATCH, SEQUENCE, size, generator=generator, dtype=torch.float64)
        tokens = torch.randint(size, (BATCH, SEQUENCE), generator=generator)
        scale = torch.rand(BATCH, SEQUENCE - 1, generator=generator, dtype=torch.float64)
        mine = torch.full((BATCH, SEQUENCE, where.local_shape[0]), 3.0, dtype=torch.float64)
        mine[..., : stop - start] = logits[..., start:stop]
        mine.requires_grad_()
        found = lp.from_parallel_logits_to_logprobs(mine, tokens, inference=False, vocabulary=size)
        (found * scale).sum().backward()
        other = logits.clone().requires_grad_()
        places = tokens[:, 1:].unsqueeze(-1)
        expected = other[:, :-1].log_softmax(-1).gather(-1, places).squeeze(-1)
        (expected * scale).sum().backward()
        assert mine.grad is not None and other.grad is not None
        if not close(found.detach(), expected.detach()):
            faults.append(f"odd={odd}: values")
        part = mine.grad[..., : stop - start]
        if not close(part, other.grad[..., start:stop]) or mine.grad[..., stop - start :].any():
            faults.append(f"odd={odd}: gradient")
        plain = lp.from_parallel_logits_to_logprobs(mine, tokens, vocabulary=size)
        if plain.requires_grad or not torch.equal(plain, found.detach()):
            faults.append(f"odd={odd}: inference")
    return faults


def chunked() -> list[str]:
    faults = []
    group = lp.tensor_group()
    options = itertools.product((None, 0, 1), (1, 3, 100), (0.0, 0.1), (False, True), ("mean", "sum"), (0, 1))
    cells = list(options)[:: {1: 5, 2: 7}.get(group.size, 11)]  # steps that no dimension has as a factor
    for sequence, chunks, smoothing, biased, reduction, odd in cells:
        size = VOCABULARY - odd
        where = partition((size, WIDTH), 0, group, pad=True)
        ((start, stop),) = where.slices()
        generator = seeded(4)
        shape = (BATCH, SEQUENCE) if sequence == 1 else (SEQUENCE, BATCH)
        hidden = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64)
        weight = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        bias = torch.randn(size, generator=generator, dtype=torch.float64) if biased else None
        target = torch.randint(size, shape, generator=generator)
        target[1, 1] = -100
        own = hidden.clone().requires_grad_()
        piece = own if sequence is None else lp.scatter_to_sequence_parallel_region(own, sequence)
        own_weight = where.take(weight).requires_grad_()
        own_bias = (
            None if bias is None else partition((size,), 0, group, pad=True).take(bias).requires_grad_()
        )
        loss = lp.parallel_linear_cross_entropy(
            piece, own_weight, target, own_bias, chunks=chunks, reduction=reduction,
            label_smoothing=smoothing, vocabulary=size,
            sequence_dimension=sequence,
        )  # fmt: skip
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)] + (
            [] if bias is None else [bias.clone().requires_grad_()]
        )
        logits = F.linear(leaves[0], leaves[1], leaves[2] if biased else None)
        expected = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), reduction=reduction, label_smoothing=smoothing
        )
        (3 * loss).backward()
        (3 * expected).backward()
        label = (
            f"sequence={sequence} chunks={chunks} smoothing={smoothing} bias={biased} {reduction} odd={odd}"
        )
        found = [own.grad, own_weight.grad[: stop - start]] + (
            [] if own_bias is None else [own_bias.grad[: stop - start]]
        )  # type: ignore[index]
        wanted = [leaves[0].grad, *(leaf.grad[start:stop] for leaf in leaves[1:])]  # type: ignore[index]
        if not close(loss.detach(), expected.detach()):
            faults.append(f"{label}: loss {loss.item()} {expected.item()}")
        if not all(
            a is not None and b is not None and close(a, b) for a, b in zip(found, wanted, strict=True)
        ):
            faults.append(f"{label}: gradients")
    return faults


def everything() -> dict[str, list[str]]:
    parts = {"embedding": embeddings, "cross entropy": losses, "logprobs": logprobs, "in chunks": chunked}
    return {name: part() for name, part in parts.items()}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_embedding_and_cross_entropy(size: int) -> None:
    for faults in on_ranks(size, everything):
        assert not any(faults.values()), faults


def bad_tokens() -> list[str]:
    messages = []
    layer = lp.ParallelEmbedding(12, 4)
    calls = [
        lambda: layer(torch.tensor([12])),
        lambda: lp.parallel_cross_entropy(torch.zeros(1, 6), torch.tensor([12])),
        lambda: lp.parallel_cross_entropy(torch.zeros(2, 6), torch.tensor([1])),
        lambda: lp.parallel_cross_entropy(torch.zeros(1, 6), torch.tensor([1]), vocabulary=13),
        lambda: lp.parallel_cross_entropy(torch.zeros(1, 6), torch.tensor([1]), 1.0),
        lambda: lp.parallel_linear_cross_entropy(
            torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([1]), reduction="none"
        ),
        lambda: lp.parallel_linear_cross_entropy(torch.zeros(1, 4), torch.zeros(6, 4), torch.tensor([1, 2])),
    ]
    for call in calls:
        with pytest.raises(lp.ParallelError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_errors_say_what_was_given() -> None:
    for messages in on_ranks(2, bad_tokens):
        words = ("12", "12", "(2, 6)", "13", "label_smoothing=1.0", "'none'", "(2,)")
        assert len(messages) == len(words) and all(
            word in message for word, message in zip(words, messages, strict=True)
        )


def elsewhere() -> bool:
    """Where looking would wait for the device, an assertion is left to it; on the CPU that raises at once."""
    layer = lp.ParallelEmbedding(12, 8)
    logits = torch.zeros(2, 6)
    for look in (True, False):
        with patch("lowtide.parallel.vocabulary._looks_freely", lambda tokens, look=look: look):
            expected = lp.ParallelError if look else RuntimeError
            layer(torch.tensor([0, 11]))
            lp.parallel_cross_entropy(logits, torch.tensor([11, -100]))
            with pytest.raises(expected, match=r"token.* is not of the vocabulary of 12"):
                layer(torch.tensor([3, 12]))
            with pytest.raises(
                expected, match=r"target.* is not of the vocabulary of 12; targets that do not count are -100"
            ):
                lp.parallel_cross_entropy(logits, torch.tensor([-1, 3]))
    return True


def test_tokens_outside_the_vocabulary_raise_on_every_device() -> None:
    assert all(on_ranks(2, elsewhere))
