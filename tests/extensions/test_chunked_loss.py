"""`lowtide.chunked_loss`: the loss and the gradients of the plain model, and never all logits."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chunked import FAMILIES, VOCABULARY, batch, build, gradients, pair, same_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lowtide
from lowtide import meter
from lowtide.extensions.tiles.stand_in import Logits
from lowtide.plan.simulate import plain

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.usefixtures("quiet_transformers"),
    pytest.mark.filterwarnings("error:.*in one piece"),
]

needs_meter = pytest.mark.skipif(not meter.available(), reason="needs the counting allocator")


# ---- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_loss_of_the_plain_model(family: str) -> None:
    plain, chunked = pair(family)
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)


OPTIONS: dict[str, dict[str, Any]] = {
    "num_items_in_batch": {"num_items_in_batch": torch.tensor(70)},
    "shift_labels": {"shift_labels": batch()["labels"].roll(-1, -1)},
    "packed": {"position_ids": torch.cat([torch.arange(9), torch.arange(12)]).expand(3, -1)},
    "tuple": {"return_dict": False},
    "last tokens": {"logits_to_keep": 5, "labels": batch()["labels"][:, -5:]},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_a_call(option: str) -> None:
    plain, chunked = pair()
    given = batch() | OPTIONS[option]
    same_step(plain, chunked, lambda model: model(**given)[0])


@pytest.mark.parametrize("pieces", [1, 2, 8, 1000])
def test_any_number_of_pieces(pieces: int) -> None:
    plain, chunked = pair(pieces=pieces)
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)


def frozen_head(model: Any) -> None:
    model.lm_head.weight.requires_grad_(False)


def frozen_body(model: Any) -> None:
    model.model.requires_grad_(False)


@pytest.mark.parametrize("freeze", [frozen_head, frozen_body])
def test_frozen_parts(freeze: Callable[[Any], None]) -> None:
    plain, chunked = pair()
    freeze(plain), freeze(chunked)
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)


def test_tied_embeddings() -> None:
    plain, chunked = pair(tie_word_embeddings=True)
    assert chunked.lm_head.weight is chunked.model.embed_tokens.weight
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float32_as_the_plain_step(dtype: torch.dtype) -> None:
    plain, chunked = (model.to(dtype) for model in pair())
    given = batch()
    exact = copy.deepcopy(plain).float()
    losses = [model(**given).loss for model in (exact, plain, chunked)]
    assert losses[2].dtype == losses[1].dtype == torch.float32
    assert abs(losses[2] - losses[1]) < 1e-6
    found = [gradients(m, loss) for m, loss in zip((exact, plain, chunked), losses, strict=True)]
    assert all(one.dtype == dtype for one in found[2])
    true, theirs, ours = (torch.cat([one.flatten().float() for one in each]) for each in found)
    assert (ours - true).norm() <= 1.1 * (theirs - true).norm()


def test_autocast() -> None:
    plain, chunked = pair()
    given = batch()

    def step(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**given).loss

    same_step(plain, chunked, step, within=2e-2)


def test_float64() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 50, dtype=torch.float64)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(x), labels)

    plain = Double()
    chunked = copy.deepcopy(plain)
    lowtide.chunked_loss(chunked, 3)
    x, labels = torch.randn(10, 8, dtype=torch.float64), torch.randint(50, (10,))
    same_step(plain, chunked, lambda model: model(x, labels), 1e-12, 1e-12)


@pytest.mark.parametrize("trained", [["lm_head"], ["lm_head", "q_proj"]])
@pytest.mark.parametrize("first", [False, True], ids=["adapter first", "loss first"])
def test_an_adapter_of_the_output_layer(trained: list[str], first: bool) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=trained, init_lora_weights=False, task_type="CAUSAL_LM")
    base = build("llama")
    torch.manual_seed(2)
    plain = peft.get_peft_model(copy.deepcopy(base), config).eval()
    if first:
        lowtide.chunked_loss(base, 4)
    chunked = peft.get_peft_model(base, config).eval()
    chunked.load_state_dict(plain.state_dict())
    if not first:
        lowtide.chunked_loss(chunked, 4)
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)
    assert isinstance(chunked(**given).logits, Logits)


# ---- losses of one's own -----------------------------------------------------------------------------


def shifted(model: Any) -> tuple[Tensor, Tensor]:
    given = batch()
    return model(given["input_ids"]).logits[:, :-1], given["labels"][:, 1:]


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    rows = -F.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (rows * (labels != -100)).sum()


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    from transformers.trainer_pt_utils import LabelSmoother

    return LabelSmoother(0.1)({"logits": logits}, labels)


WEIGHTS = torch.rand(VOCABULARY)

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda logits, labels: F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1)),
    "sum": lambda logits, labels: nn.CrossEntropyLoss(reduction="sum")(
        logits.flatten(0, 1), labels.flatten()
    ),
    "no rows": lambda logits, labels: (
        F.cross_entropy(logits[:0].flatten(0, 1), labels[:0].flatten(), reduction="sum")
        + logits[:0].logsumexp(-1).sum()
        + by_hand(logits, labels)
    ),
    "none": lambda logits, labels: F.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), reduction="none"
    ),
    "smoothing": lambda logits, labels: F.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), label_smoothing=0.1
    ),
    "smoothing, none": lambda logits, labels: F.cross_entropy(
        logits.transpose(1, 2), labels, reduction="none", label_smoothing=0.1
    ),
    "weights": lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels, WEIGHTS),
    "weights, none": lambda logits, labels: F.cross_entropy(
        logits.permute(0, 2, 1), labels, WEIGHTS, reduction="none"
    ),
    "another label": lambda logits, labels: F.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.masked_fill(labels == -100, 5).reshape(-1), ignore_index=5
    ),
    "nll": lambda logits, labels: F.nll_loss(
        torch.log_softmax(logits, -1).view(-1, VOCABULARY), labels.reshape(-1)
    ),
    "by hand": by_hand,
    "label smoother": smoothed,
    "temperature and soft cap": lambda logits, labels: by_hand(
        torch.tanh(logits / 0.7 / 2.0) * torch.tensor(2.0), labels
    ),
    "a bias of all rows": lambda logits, labels: by_hand(
        logits + torch.arange(float(VOCABULARY)) / 100, labels
    ),
    "rows by mask": lambda logits, labels: F.cross_entropy(logits[labels != -100], labels[labels != -100]),
    "rows one by one": lambda logits, labels: torch.stack(
        [F.cross_entropy(row, own) for row, own in zip(logits, labels, strict=True)]
    ).mean(),
    "some columns": lambda logits, labels: F.cross_entropy(
        logits[..., :300].reshape(-1, 300), labels.clamp(-100, 299).reshape(-1)
    ),
    "log-sum-exp": lambda logits, labels: by_hand(logits, labels) + logits.logsumexp(-1).square().mean(),
    "chunks": lambda logits, labels: sum(  # type: ignore[arg-type, return-value]
        by_hand(logit, label) for logit, label in zip(logits.split(7, 1), labels.split(7, 1), strict=True)
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_outside_the_model(name: str) -> None:
    plain, chunked = pair()
    same_step(plain, chunked, lambda model: LOSSES[name](*shifted(model)))


def elements(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.exp().mean() + 0 * labels.sum()


def written(logits: Tensor, labels: Tensor) -> Tensor:
    logits = logits.clone()
    logits[..., 3] = -10
    logits.div_(2)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    targets = F.one_hot(labels.clamp(min=0), VOCABULARY).float()
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1, VOCABULARY))


class Own(torch.autograd.Function):
    """A function that takes logits as any other tensor."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1))
        return torch.logsumexp(logits, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.saved_tensors[0] * grad.unsqueeze(-1)


FULL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "exp": elements,
    "written": written,
    "probabilities": probabilities,
    "softmax": lambda logits, labels: (logits.softmax(-1) ** 2).sum(-1).mean(),
    "norm": lambda logits, labels: torch.linalg.vector_norm(logits),
    "einsum": lambda logits, labels: torch.einsum("btv,v->bt", logits, WEIGHTS).square().mean(),
    "concatenation": lambda logits, labels: torch.cat([logits, 2 * logits]).square().mean(),
    "choice": lambda logits, labels: torch.where(logits > 0, logits, 0.1 * logits).square().mean(),
}


@pytest.mark.parametrize("name", FULL)
def test_anything_else_gets_the_logits_and_says_where(name: str) -> None:
    plain, chunked = pair()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same_step(plain, chunked, lambda model: FULL[name](*shifted(model)))
    texts = [str(one.message) for one in said if "in one piece" in str(one.message)]
    assert len(texts) >= 1 and all("test_chunked_loss.py:" in text and "KiB" in text for text in texts)


def test_a_function_of_ones_own() -> None:
    plain, chunked = pair()
    with pytest.warns(lowtide.LowtideWarning, match="in one piece"):
        same_step(plain, chunked, lambda model: Own.apply(shifted(model)[0]).mean())  # type: ignore


# ---- TRL ---------------------------------------------------------------------------------------------


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """As TRL had it for float32."""
    selected = torch.gather(logits, -1, index.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])


def dpo_loss(model: Any, reference: Any, log_softmax: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """DPO as TRL's trainers compute it that take logits: chosen and rejected rows in one batch."""
    given = batch(4)
    labels = given["labels"][:, 1:]
    mask = labels != -100
    with torch.no_grad():
        theirs = log_softmax(reference(given["input_ids"]).logits[:, :-1], labels.clamp(min=0))
    ours = log_softmax(model(given["input_ids"]).logits[:, :-1], labels.clamp(min=0))
    ratios = ((ours - theirs) * mask).sum(-1)
    chosen, rejected = ratios.chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("installed", [False, True], ids=["as written here", "of the library"])
def test_dpo(installed: bool, dtype: torch.dtype) -> None:
    function = selective_log_softmax
    if installed:
        function = pytest.importorskip("trl.trainer.utils").selective_log_softmax
    plain, chunked = (model.to(dtype) for model in pair())
    reference = build(seed=7).to(dtype)
    lowtide.chunked_loss(reference, 4, reference=True)
    within = {torch.float32: (1e-6, 2e-5), torch.bfloat16: (2e-2, 6e-2)}[dtype]
    same_step(plain, chunked, lambda model: dpo_loss(model, reference, function), *within)


def test_a_reference_model_makes_no_logits() -> None:
    reference = build("llama", hidden_size=16, intermediate_size=16, num_attention_heads=2)
    lowtide.chunked_loss(reference, 8, reference=True)
    labels = batch()["labels"][:, 1:].clamp(min=0)
    with Largest() as seen, torch.no_grad():
        selective_log_softmax(reference(batch()["input_ids"]).logits[:, :-1], labels)
    assert seen.elements <= VOCABULARY * 16


def test_metrics_of_a_trainer_in_pieces() -> None:
    """Accuracy and entropy, as TRL's trainers take them of logits that a loss was taken of."""
    entropy = pytest.importorskip("trl.trainer.utils").entropy_from_logits
    plain, chunked = pair(pieces=4)
    given = batch()
    found = []
    for model in (plain, chunked):
        logits = model(**given).logits
        with torch.no_grad():
            logits = logits[..., :-1, :]
            highest = logits.max(-1, keepdim=True)
            found.append((entropy(logits.contiguous(), 7), *highest, logits.argmax(-1), *logits.topk(3)))
    assert all(torch.allclose(a, b, 1e-5) for a, b in zip(*found, strict=True))


# ---- what it takes -----------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made, and how many rows and columns go through products."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(one, Tensor):
                self.elements = max(self.elements, one.numel())
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            shapes = [tuple(one.shape) for one in args if isinstance(one, Tensor)][-2:]
            if any(VOCABULARY in shape for shape in shapes):
                self.products += shapes[0][0] * shapes[0][1] * shapes[1][1]
        return made


@pytest.mark.parametrize(("loss", "products"), [("mean", 3), ("none", 4), ("by hand", 4)])
def test_no_tensor_is_larger_than_a_piece_and_no_product_runs_twice(loss: str, products: int) -> None:
    """A piece's three products: its logits, and the gradients of its rows and of the weight. Where it is not
    known how much a row counts, its logits are made again.
    """
    model = build("llama", hidden_size=16, intermediate_size=16, num_attention_heads=2)
    lowtide.chunked_loss(model, 8)
    with Largest() as seen:
        gradients(model, LOSSES[loss](*shifted(model)).sum())
    assert seen.products == products * 3 * 20 * 16 * VOCABULARY
    assert seen.elements <= max(-(-63 // 8) * VOCABULARY, VOCABULARY * 16)


def step(model: Any, given: dict[str, Tensor], outside: bool = False) -> tuple[Tensor, list[Tensor]]:
    if outside:
        logits = model(given["input_ids"]).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), given["labels"][:, 1:].flatten())
    else:
        loss = model(**given).loss
    return loss.detach(), gradients(model, loss)


@needs_meter
@pytest.mark.parametrize("outside", [False, True], ids=["in the model", "outside"])
def test_the_peak_is_without_logits_and_a_limit_holds(outside: bool) -> None:
    plain, chunked = pair("llama", 16, vocab_size=2000)
    given = batch(8, 64, 2000)
    logits_bytes = 8 * 64 * 2000 * 4
    peaks = [lowtide.measure(lambda m=m: step(m, given, outside)).peak_bytes for m in (plain, chunked)]
    assert peaks[0] > 2 * logits_bytes and peaks[1] < 0.8 * logits_bytes
    expected = step(chunked, given, outside)
    for budget in ("60%", "min"):
        limited = copy.deepcopy(chunked)
        handle = lowtide.limit_memory(limited, budget, progress=False)
        for _ in range(3):
            found = step(limited, given, outside)
            assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
        assert handle.measured_peak_bytes is not None and handle.budget_bytes is not None
        assert handle.measured_peak_bytes <= handle.budget_bytes


@needs_meter
def test_evaluation_with_labels_is_without_logits() -> None:
    _, chunked = pair("llama", 16, vocab_size=2000)
    given = batch(8, 64, 2000)
    with torch.no_grad():
        peak = lowtide.measure(lambda: chunked(**given).loss).peak_bytes
    assert peak < 0.25 * 8 * 64 * 2000 * 4


# ---- a model like any other --------------------------------------------------------------------------


def test_evaluation_and_generation_have_logits() -> None:
    plain, chunked = pair()
    given = batch()
    with torch.no_grad():
        logits = chunked(given["input_ids"]).logits
        assert type(logits) is Tensor and torch.equal(logits, plain(given["input_ids"]).logits)
        assert torch.equal(chunked(**given).loss, chunked(**given).loss)
    options = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(given["input_ids"]))
    tokens = [model.generate(given["input_ids"], **options) for model in (plain, chunked)]
    assert torch.equal(*tokens)


def test_logits_of_a_step_say_what_they_are() -> None:
    _, chunked = pair()
    logits = chunked(**batch()).logits
    assert "chunked_loss" in repr(logits) and logits.shape == (3, 21, VOCABULARY)
    assert logits.requires_grad and logits.dtype == torch.float32


def test_logits_after_a_step_of_the_optimizer_are_refused() -> None:
    _, chunked = pair()
    output = chunked(**batch())
    output.loss.backward()
    torch.optim.SGD(chunked.parameters(), 0.1).step()
    with pytest.raises(lowtide.LowtideError, match=r"before the optimizer's step.*remove\(\)"):
        output.logits.argmax(-1)


def test_a_write_into_shared_logits_is_refused() -> None:
    _, chunked = pair()
    logits = chunked(batch()["input_ids"]).logits
    part = logits[:, 1:]
    with pytest.raises(lowtide.LowtideError, match=r"clone\(\)"):
        logits.div_(2)
    assert part.shape[1] == 20


def test_remove_and_pieces() -> None:
    plain, chunked = build(hidden_size=16), build(hidden_size=16)
    handle = lowtide.chunked_loss(chunked, 2)
    assert handle.pieces == 2
    handle.pieces = 3
    with Largest() as seen:
        gradients(chunked, chunked(**batch()).loss)
    assert seen.elements == 21 * VOCABULARY
    handle.remove()
    assert "forward" not in chunked.lm_head.__dict__ and not chunked._forward_hooks
    given = batch()
    assert torch.equal(plain(**given).loss, chunked(**given).loss)
    handle.remove()


def test_a_piece_has_as_many_tokens_at_any_length_where_nobody_says_how_many_pieces() -> None:
    model = build(hidden_size=16, intermediate_size=16, num_attention_heads=2, max_position_embeddings=4096)
    handle = lowtide.chunked_loss(model)
    assert handle.pieces is None
    for tokens, rows in ((500, 500), (3000, 1024)):
        given = batch(1, tokens)
        with Largest() as seen:
            gradients(model, F.cross_entropy(model(given["input_ids"]).logits[0], given["labels"][0]))
        assert seen.elements == rows * VOCABULARY
    handle.pieces = 1
    with Largest() as seen:
        gradients(model, F.cross_entropy(model(given["input_ids"]).logits[0], given["labels"][0]))
    assert seen.elements == 3000 * VOCABULARY


@pytest.mark.parametrize("pieces", [0, -1, 2.0, "auto", True])
def test_pieces_that_are_no_number_are_refused(pieces: Any) -> None:
    with pytest.raises(lowtide.LowtideError, match="at least 1"):
        lowtide.chunked_loss(build(), pieces)


def test_a_model_without_an_output_layer_is_refused() -> None:
    with pytest.raises(lowtide.LowtideError, match="output layer"):
        lowtide.chunked_loss(nn.Linear(2, 2))
    net = torch.nn.Sequential()
    net.head = torch.nn.Linear(4, 8)
    lowtide.tile(net.head)
    with pytest.raises(lowtide.LowtideError, match=r"as lowtide\.tile does"):
        lowtide.chunked_loss(net)


def test_a_layer_that_is_no_product_is_refused() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = build()
    model.lm_head.__class__ = Scaled
    lowtide.chunked_loss(model)
    with pytest.raises(lowtide.LowtideError, match="no matrix product"):
        model(**batch())


def test_copies_and_pickles_keep_it() -> None:
    plain, chunked = pair()
    buffer = io.BytesIO()
    torch.save(chunked, buffer)
    buffer.seek(0)
    given = batch()
    for twin in (copy.deepcopy(chunked), torch.load(buffer, weights_only=False)):
        with torch.no_grad():
            twin.lm_head.weight.mul_(2)
        same = copy.deepcopy(plain)
        with torch.no_grad():
            same.lm_head.weight.mul_(2)
        same_step(same, twin, lambda model: model(**given).loss)
        assert isinstance(twin(**given).logits, Logits)
        lowtide.chunked_loss(twin).remove()
        assert type(twin(**given).logits) is Tensor
    assert isinstance(chunked(**given).logits, Logits)


def test_what_is_saved_is_the_model(tmp_path: Path) -> None:
    plain, chunked = pair()
    chunked.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert all(map(torch.equal, loaded.parameters(), plain.parameters()))
    assert list(chunked.state_dict()) == list(plain.state_dict())


def test_checkpointing_and_accumulation() -> None:
    plain, chunked = pair()
    for model in (plain, chunked):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    def twice(model: Any) -> Tensor:
        model(**batch(2)).loss.backward()
        return model(**batch()).loss

    same_step(plain, chunked, twice)


def test_compiled_blocks() -> None:
    plain, chunked = pair(num_hidden_layers=1)
    for layer in chunked.model.layers:
        layer.compile(backend="eager")
    given = batch()
    same_step(plain, chunked, lambda model: model(**given).loss)


def test_a_compiled_model_runs_as_it_does_without_or_in_pieces() -> None:
    """Dynamo may leave the output layer out of its graphs; a warning says where it does not."""
    plain, chunked = pair(num_hidden_layers=1)
    chunked.compile(backend="eager")
    given = batch()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        same_step(plain, chunked, lambda model: model(**given).loss)
        is_whole = type(chunked(**given).logits) is Tensor
    assert is_whole == any("torch.compile is around the output layer" in str(one.message) for one in said)


def test_a_graph_that_is_kept() -> None:
    _, chunked = pair()
    loss = chunked(**batch()).loss
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in chunked.parameters()]
    chunked.zero_grad()
    loss.backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(first, chunked.parameters(), strict=True))


def test_a_scaled_loss_in_float16_keeps_small_gradients() -> None:
    """`GradScaler` scales the loss, and gradients are made before it does."""
    model = build().half()
    lowtide.chunked_loss(model, 4)
    given = batch()
    loss = model(**given).loss * 1e-4
    (loss * 2.0**14).backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if "norm" in name)


@pytest.mark.parametrize("by_its_configuration", [False, True])
def test_a_built_in_model(by_its_configuration: bool) -> None:
    from lowtide.models.gpt import GPT
    from lowtide.models.presets import preset

    plain, chunked = (
        GPT(preset("gpt-nano", vocabulary=2000)),
        GPT(preset("gpt-nano", vocabulary=2000, loss_chunks=4)),
    )
    chunked.load_state_dict(plain.state_dict())
    if not by_its_configuration:
        chunked = copy.deepcopy(plain)
        lowtide.chunked_loss(chunked, 4)
    tokens, targets = torch.randint(256, (2, 64)), torch.randint(256, (2, 64))
    plain.eval(), chunked.eval()
    same_step(plain, chunked, lambda model: model(tokens, targets).loss)
    with torch.no_grad(), Largest() as seen:
        chunked(tokens, targets)
    assert seen.elements < 128 * 2000
    with torch.no_grad():
        assert type(chunked(tokens).logits) is Tensor


# ---- a step that does not run ------------------------------------------------------------------------


def of_the_model(model: Any, given: dict[str, Tensor]) -> Tensor:
    return model(**given).loss


def of_rows(model: Any, given: dict[str, Tensor]) -> Tensor:
    logits = model(given["input_ids"]).logits[:, :-1]
    return by_hand(logits, given["labels"][:, 1:])


@pytest.mark.parametrize("loss", [of_the_model, of_rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_on_fake_tensors_sees_the_step_that_runs(
    loss: Callable[[Any, dict[str, Tensor]], Tensor], dtype: torch.dtype
) -> None:
    """Operations and bytes; gradients that meet are added in place in a step that runs."""
    model, given = build().to(dtype), batch(2, 40)
    lowtide.chunked_loss(model, 4)
    found = []
    for fake in (True, False):
        graph = lowtide.trace(lambda: loss(model, given), model=model, costs=False, fake=fake)
        names = [one.name.replace("add_", "add") for one in graph.operations]
        sums = {at for at, name in enumerate(names) if name == "aten.add.Tensor"}
        sizes = sorted(one.bytes for one in graph.storages if one.producer not in sums)
        found.append((names, sizes, len(graph.saved), plain(graph).peak_bytes))
    assert found[0][:3] == found[1][:3]
    assert found[0][3] == pytest.approx(found[1][3], rel=0.01)
