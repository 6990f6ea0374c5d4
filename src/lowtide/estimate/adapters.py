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
from lowtide.estimate.shape import Shape, kv_heads_per_rank

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
    "quantize": "none",
}  # fmt: skip
"""Settings that say nothing without adapters, and their defaults."""

GROUPS = {"all-linear": "q,k,v,o,gate,up,down", "attention": "q,k,v,o", "mlp": "gate,up,down"}
"""Targets by a common name."""


def matrices(model: Shape, tp: int = 1) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of each linear layer of a transformer layer, on one tensor-parallel rank.

    >>> from lowtide.estimate.presets import preset
    >>> matrices(preset("llama3-8b").shape)["k"]
    (4096, 1024)
    """
    queries, inner = model.query_width // tp, model.ffn // tp
    keys = kv_heads_per_rank(model.kv_heads, tp) * model.head_width
    found = {
        "q": (model.hidden, queries),
        "k": (model.hidden, keys),
        "v": (model.hidden, keys),
        "o": (queries, model.hidden),
        "gate": (model.hidden, inner),
        "up": (model.hidden, inner),
        "down": (inner, model.hidden),
    }
    if model.mlp_matrices == 2:
        del found["gate"]
    return found


def targets(text: str, model: Shape) -> tuple[str, ...]:
    """The linear layers that have adapters.

    >>> from lowtide.estimate.presets import preset
    >>> targets("q_proj,v_proj", preset("llama3-8b").shape)
    ('q', 'v')

    Raises:
        EstimateError: a name is not known, or the model has no such layer.
    """
    known = matrices(model)
    if text in GROUPS:
        return tuple(name for name in GROUPS[text].split(",") if name in known)
    names = [name.strip().removesuffix("_proj") for name in text.split(",")]
    for name in names:
        if name not in known:
            raise EstimateError(
                f"--lora-targets={text!r}: {name!r} is no linear layer of the model; choose "
                f"{', '.join(GROUPS)}, or some of {','.join(known)}"
            )
    return tuple(name for name in known if name in names)


def layer_adapters(config: Any, tp: int = 0) -> int:
    """Parameters of one layer's adapters on one rank (of ``tp``, where given): of each target A (inputs x r)
    and B (r x outputs), and DoRA's magnitude of each output.
    """
    sizes = matrices(config.model, tp or config.tp)
    own = (sizes[name] for name in targets(config.lora_targets, config.model))
    return sum(config.lora * (inputs + outputs) + outputs * config.dora for inputs, outputs in own)


def largest_matrix(config: Any) -> int:
    """Elements of a layer's largest matrix on one rank."""
    return max(inputs * outputs for inputs, outputs in matrices(config.model, config.tp).values())


def layer_bytes(config: Any) -> Fraction:
    """Bytes of one layer's frozen weights on one rank."""
    model, t = config.model, config.tp
    rest = model.layer_matrix_parameters(t) - model.layer_weight_elements(t) + model.layer_shared_parameters()
    if config.quantize == "none":
        return Fraction(config.frozen_bytes * (rest + model.layer_weight_elements(t)))
    weight, row = QUANTIZED_BYTES[config.quantize]
    rows = sum(outputs for _, outputs in matrices(model, t).values())
    return weight * model.layer_weight_elements(t) + row * rows + config.frozen_bytes * rest


def unadapted(config: Any) -> Any:
    """The same run of the whole model."""
    return replace(config, lora=0, **LORA_ONLY)


def frozen_inputs(config: Any) -> set[str]:
    """Names of a layer's terms that nothing keeps, since the products that read them are frozen."""
    own = set() if config.adapter_copies else set(targets(config.lora_targets, config.model))
    readers = {
        "input of the q, k, v projection": {"q", "k", "v"},
        "input of the MLP": {"gate", "up"},
        "input of the MLP's last layer": {"down"},
    }
    if not config.fused_attention:  # a fused kernel keeps its output itself
        readers["input of the output projection"] = {"o"}
    return {name for name, needed in readers.items() if not needed & own}


def adapter_terms(config: Any) -> list[Term]:
    """What one layer's adapters keep of a micro-batch: their inputs where each casts its own, the outputs of
    A, and what DoRA scales.
    """
    own = targets(config.lora_targets, config.model)
    e = config.adapter_copies or config.element_bytes
    sizes = matrices(config.model, config.tp)
    count = Fraction(e * config.tokens * config.lora * len(own))
    name = "outputs of the adapters' A"
    found = [Term(name, count, f"{e}sbr x {len(own)}", LORA, "attention")]
    if config.adapter_copies:
        size = e + (config.lora_dropout > 0)  # a mask of one byte
        read = Fraction(size * config.tokens * sum(sizes[one][0] for one in own))
        note = "each adapter's own: in the dtype that it works in (peft), or dropped out"
        found.append(Term("inputs of the adapters", read, f"{size}sb x inputs", LORA, "attention", note))
    if config.dora:
        wide = Fraction(e * config.tokens * sum(sizes[one][1] for one in own))
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
    sizes = matrices(config.model, config.tp)
    own = [sizes[name] for name in targets(config.lora_targets, config.model)]
    elements = sum(inputs for inputs, _ in own), sum(outputs for _, outputs in own)
    again = 1 + config.recomputed_share
    moved = (again * forward[side] + backward[side] for side in range(2))
    return config.tokens * sum(size * each for size, each in zip(elements, moved, strict=True))
