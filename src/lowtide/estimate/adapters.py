"""Adapters beside frozen weights: LoRA (arXiv 2106.09685), DoRA (2402.09353), and QLoRA's quantised weights
(2305.14314).

A frozen weight has no gradient and no state, and a product with it need not keep its input: the gradient of
that needs the weight alone.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from lowtide.estimate.errors import EstimateError
from lowtide.estimate.lines import Term
from lowtide.estimate.shape import Matrix, Shape

Quantize = Literal["none", "nf4", "int8", "fp8"]
LORA = "arXiv 2106.09685 Sec. 4.1"
DORA = "arXiv 2402.09353 Sec. 4.1"
QLORA = "arXiv 2305.14314 Sec. 3"

QUANTIZED_BYTES: dict[str, tuple[Fraction, Fraction]] = {
    "nf4": (Fraction(1, 2) + Fraction(1, 64) + Fraction(4, 64 * 256), Fraction(0)),
    "int8": (Fraction(1), Fraction(4)),
    "fp8": (Fraction(1), Fraction(4)),
}
"""Bytes of a quantised weight with its share of the scales, and of each row of a matrix beside. ``nf4``: four
bits, a scale for each block of 64 of one byte, and a float32 one for each 256 of these (double quantisation);
``int8`` (2208.07339) and ``fp8``: one byte, and a float32 scale a row.
"""

LORA_ONLY: dict[str, Any] = {
    "lora_targets": "all-linear", "lora_dtype": "fp32", "lora_dropout": 0.0, "dora": False,
    "quantize": "none", "flat_parameters": False,
}  # fmt: skip
"""Settings that say nothing without adapters, and their defaults."""

GROUPS = ("all-linear", "attention", "mlp")
"""Targets by a common name."""


def targets(text: str, model: Shape) -> tuple[str, ...]:
    """The linear layers that have adapters.

    >>> from lowtide.estimate.presets import preset
    >>> targets("q_proj,v_proj", preset("llama3-8b").shape)
    ('q', 'v')

    Raises:
        EstimateError: a name is not known, or the model has no such layer.
    """
    known = model.matrices()
    if text in GROUPS:
        return tuple(name for name, one in known.items() if text in ("all-linear", one.part))
    names = [name.strip().removesuffix("_proj") for name in text.split(",")]
    for name in names:
        if name not in known:
            raise EstimateError(
                f"--lora-targets={text!r}: {name!r} is no linear layer of the model; choose "
                f"{', '.join(GROUPS)}, or some of {','.join(known)}"
            )
    return tuple(name for name in known if name in names)


def adapted(config: Any, tp: int = 0, ep: int = 0) -> list[Matrix]:
    """The linear layers that have adapters, on one rank (of so many, where given)."""
    sizes = config.model.matrices(tp or config.tp, ep or config.ep)
    return [sizes[name] for name in targets(config.lora_targets, config.model)]


def layer_adapters(config: Any, tp: int = 0, ep: int = 0) -> int:
    """Parameters of one layer's adapters on one rank (of so many, where given): of each target A
    (inputs x r) and B (r x outputs), and DoRA's magnitude of each output.
    """
    return sum(
        one.copies * (config.lora * (one.inputs + one.outputs) + one.outputs * config.dora)
        for one in adapted(config, tp, ep)
    )


def largest_matrix(config: Any) -> int:
    """Elements of a layer's largest matrix on one rank."""
    return max(one.elements for one in config.model.matrices(config.tp, config.ep).values())


def layer_bytes(config: Any, ep: int = 0) -> Fraction:
    """Bytes of one layer's frozen weights on one rank (of so many expert-parallel ones, where given)."""
    model, t, ep = config.model, config.tp, ep or config.ep
    matrices = model.layer_weight_elements(t, ep)
    rest = model.layer_matrix_parameters(t, ep) - matrices + model.layer_shared_parameters(ep)
    if config.quantize == "none":
        return Fraction(config.frozen_bytes * (rest + matrices))
    weight, row = QUANTIZED_BYTES[config.quantize]
    rows = sum(one.copies * one.outputs for one in model.matrices(t, ep).values())
    return weight * matrices + row * rows + config.frozen_bytes * rest


def unadapted(config: Any) -> Any:
    """The same run of the whole model."""
    return replace(config, lora=0, **LORA_ONLY)


def frozen_inputs(config: Any) -> set[str]:
    """Names of a layer's terms that nothing keeps, since the products that read them are frozen."""
    if config.flat_parameters:
        return set()
    own = set() if config.adapter_copies else set(targets(config.lora_targets, config.model))
    readers = {
        "input of the q, k, v projection": {"q", "k", "v", "q_a", "kv_a"},
        "input of the MLP": {"shared_gate", "shared_up", *(() if config.model.experts else ("gate", "up"))},
        "inputs of the experts": {"gate", "up"},
        "input of the MLP's last layer": {"down", "shared_down"},
    }
    if config.model.norms == 1:
        readers["input of the q, k, v projection"] |= {"gate", "up"}
    if not config.fused_attention:  # a fused kernel keeps its output itself
        readers["input of the output projection"] = {"o"}
    return {name for name, needed in readers.items() if not needed & own}


def adapter_terms(config: Any) -> list[Term]:
    """What one layer's adapters keep of a micro-batch: their inputs where each casts its own, the outputs of
    A, and what DoRA scales.
    """
    own = adapted(config)
    e = config.adapter_copies or config.element_bytes
    many = sum(one.rows for one in own)
    count = Fraction(e * config.tokens * config.lora * many)
    name = "outputs of the adapters' A"
    found = [Term(name, count, f"{e}sbr x {many}", LORA, "attention")]
    if config.adapter_copies:
        size = e + (config.lora_dropout > 0)  # a mask of one byte
        read = Fraction(size * config.tokens * sum(one.rows * one.inputs for one in own))
        note = "each adapter's own: in the dtype that it works in (peft), or dropped out"
        found.append(Term("inputs of the adapters", read, f"{size}sb x inputs", LORA, "attention", note))
    if config.dora:
        wide = Fraction(e * config.tokens * sum(one.rows * one.outputs for one in own))
        found.append(Term("outputs that DoRA scales", wide, f"{e}sb x outputs", DORA, "attention"))
    return found


def adapter_traffic(config: Any) -> Fraction:
    """Bytes that one layer's adapters move in a micro-batch, where each operation reads and writes memory:
    with so few columns their products, too, wait for it.

    Forward casts the input where dtypes differ, and reads it; writes the adapter's output, scales it, adds it
    to the frozen layer's, and casts the sum. Backward does the same with gradients, and adds those of the
    input.
    """
    e = config.element_bytes
    a = 4 if config.single_adapters and config.dtype != "mixed" else e
    cast = a + e if a != e else 0
    forward = (cast + a, 5 * a + e + cast)
    backward = (2 * a + cast + 3 * e, 4 * a + cast)
    own = adapted(config)
    elements = sum(one.rows * one.inputs for one in own), sum(one.rows * one.outputs for one in own)
    again = 1 + config.recomputed_share
    moved = (again * forward[side] + backward[side] for side in range(2))
    return config.tokens * sum(size * each for size, each in zip(elements, moved, strict=True))
