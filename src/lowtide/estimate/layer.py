"""What autograd keeps of one transformer layer, tensor by tensor.

The terms are those of arXiv 2205.05198, Section 4.1, split over tensor-parallel ranks as in Sections 4.2.1
and 4.2.2, and widened to what came
after: grouped-query attention, SwiGLU, squared ReLU, fused attention, no dropout, other dtypes. As in the
paper the statistics of the norms (at most 16 bytes a token and layer) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from lowtide.estimate.adapters import adapter_terms, frozen_inputs
from lowtide.estimate.config import Config
from lowtide.estimate.lines import KORTHIKANTI, Term, total
from lowtide.estimate.shape import GATED, SEPARATE

SECTION = f"{KORTHIKANTI} Sec. 4.1"
AUTOCAST = "liveness: autocast's casts"
FUSED = "arXiv 2205.14135 Alg. 1"
GROUPED = f"{SECTION}; grouped queries: 2305.13245"
SWIGLU = f"{SECTION}; SwiGLU: 2002.05202"
SQUARED = f"{SECTION}; squared ReLU: 2109.08668"
TENSOR = f"{SECTION}; torch.distributed.tensor.parallel"
EXPERTS = f"{SECTION}; experts: 2101.03961 Sec. 2.1; grouped products"
NORMS = "liveness of transformers' RMS norm: its input in float32, its quotient"
LATENT = f"{SECTION}; latent attention: 2405.04434 Sec. 2.1"
EXCHANGED = f"{SECTION}; heads exchanged for tokens: 2309.14509"
BEFORE_NORM = "queries and keys before their norm"
TORCHTITAN = f"{SECTION}; torchtitan's selective_ac_option op"


ROUTING: dict[str, tuple[int, int, int, int, int]] = {
    "softmax": (4, 0, 0, 36, 4),
    "sigmoid": (4, 4, 4, 38, 4),
    "chosen": (0, 0, 0, 42, 0),
}
"""Bytes that a router and the ways of tokens to experts and back keep: of each token and expert, each token
and hidden element, each weight of the router, each choice, and each token. A softmax over all experts keeps
scores in float32, DeepSeek's router works in float32; of a choice there are its index, its place among the
sorted ones, and back, and its weight, here without its own dtype's bytes.
"""


def _over(size: int) -> str:
    return "" if size == 1 else "/t"


def layer_terms(config: Config) -> list[Term]:
    """Everything that one layer keeps of one micro-batch on one rank, without recomputation.

    Their sum is Equation 1 of arXiv 2205.05198, and 2 or 4 where the layer is split.

    Example:
        >>> from lowtide.estimate.settings import configure
        >>> from lowtide.estimate.lines import total
        >>> config = configure("22b", micro_batch=4)
        >>> s, b, h, a = 2048, 4, 6144, 64
        >>> total(layer_terms(config)) == s * b * h * 34 + 5 * a * s * s * b
        True
    """
    model, tokens = config.model, config.tokens
    e, x = config.element_bytes, config.residual_bytes
    shared, over = config.replication, _over(config.replication)
    over_t = _over(config.tp)
    hidden = Fraction(tokens * model.hidden, shared)
    queries, keys = Fraction(tokens * model.query_width, config.tp), Fraction(tokens * config.local_kv_width)
    attended, values = Fraction(tokens * model.output_width, config.tp), tokens * config.local_value_width
    inner = config.inner_elements
    grouped = model.kv_heads != model.heads
    repeated = grouped and not config.fused_attention and config.recompute != "selective"
    copies = config.key_copies
    kept_keys, kept_values = (queries, attended) if repeated else (copies * keys, Fraction(copies * values))
    if config.fused_qkv and model.positions == "rotary":  # what turned queries and keys are is beside it
        kept_values += queries + keys
    key_formula = f"{e}sb(kd){over_t}" if grouped and not repeated else f"{e}sbh{over_t}"
    key_source = GROUPED if grouped else SECTION
    key_note = "each repeated for its group of queries, as separate operations need them" if repeated else ""
    wide = "" if model.query_width == model.hidden else " (h = ad)"
    terms = [
        Term("input of the attention norm", x * hidden, f"{x}sbh{over}", SECTION, "input"),
        Term("input of the q, k, v projection", e * hidden, f"{e}sbh{over}", SECTION, "attention"),
        *_latent_terms(config),
        Term("queries", e * queries, f"{e}sbh{over_t}{wide}", SECTION, "attention"),
        Term("keys", e * kept_keys, key_formula, key_source, "attention", key_note),
        Term("values", e * kept_values, key_formula, key_source, "attention", key_note),
        *_qk_norm(config, queries, keys, over_t),
        *core_terms(config),
        Term("input of the output projection", e * attended, f"{e}sbh{over_t}{wide}", SECTION, "attention"),
    ]
    if config.cp_exchange == "all-to-all":
        name, note = "output of attention before its exchange", "the kernel keeps its own"
        terms.append(Term(name, e * attended, f"{e}sbh{over_t}", EXCHANGED, "attention", note))
    if config.dropout:
        terms.append(Term("mask of the attention's dropout", hidden, f"sbh{over}", SECTION, "attention"))
    if not model.parallel:
        terms.append(Term("input of the MLP norm", x * hidden, f"{x}sbh{over}", SECTION, "mlp"))
    if model.norms > 1:
        terms.append(Term("input of the MLP", e * hidden, f"{e}sbh{over}", SECTION, "mlp"))
    terms += [
        *_expert_terms(config),
        *_activation_terms(config, inner, over_t),
        Term("input of the MLP's last layer", e * inner, _ffn(config, e, over_t), SECTION, "mlp"),
    ]
    if config.dropout:
        terms.append(Term("mask of the MLP's dropout", hidden, f"sbh{over}", SECTION, "mlp"))
    if config.tiles > 1:
        inner_names = (
            "gate and up projections", "silu(gate)", "input of GELU", "operations of GELU",
            "input of the square",
        )  # fmt: skip
        terms = [one for one in terms if one.name not in (*inner_names, "input of the MLP's last layer")]
    if config.head_chunks > 1:  # made again in backward, slice by slice
        again = ("queries", "keys", "values", BEFORE_NORM, "output of attention before its exchange")
        terms = [one for one in terms if one.name not in again]
    if config.keep_gathered:
        more = Fraction(2 * (config.tp - 1), config.tp) * e * tokens * model.hidden
        note = "what the shards above are gathered into"
        terms.append(Term("gathered inputs", more, f"{2 * e}sbh(t-1)/t", TENSOR, "attention", note))
    if config.unfused_norms:
        inputs = 12 * hidden - x * hidden * (2 if config.recompute == "none" else 1)
        heads = (6 - e) * (queries + keys) * model.qk_norm
        name, note = "norms in float32", "of each its input so, and the quotient that its weight scales"
        terms.append(Term(name, inputs + heads, f"{12 - x}sbh{over}", NORMS, "mlp", note))
    if config.dtype == "autocast":
        copies = Fraction(2 * model.layer_weight_elements(config.tp, config.ep))
        name, note = "bfloat16 copies of the weights", "each product keeps the copy it read"
        terms.append(Term(name, copies, f"2 x matrices{over_t}", AUTOCAST, "mlp", note))
    if config.lora:
        out = {"bfloat16 copies of the weights", *frozen_inputs(config)}
        terms = [*(term for term in terms if term.name not in out), *adapter_terms(config)]
    return terms


def core_terms(config: Config) -> list[Term]:
    """What the attention core keeps: what lies between queries, keys and values and the output of
    attention.
    """
    over = _over(config.tp)
    rows = Fraction(config.model.heads * config.tokens, config.tp)
    if config.fused_attention:
        name, note = "log-sum-exp of the scores", "one float32 for each row of scores"
        return [Term(name, 4 * rows, f"4asb{over}", FUSED, "core", note)]
    e, scores = config.element_bytes, rows * config.seq
    softmax = 4 if config.dtype == "autocast" else e
    terms = [Term("output of softmax", softmax * scores, f"{softmax}as²b{over}", SECTION, "core")]
    if config.dropout:
        terms.append(Term("mask of softmax's dropout", scores, f"as²b{over}", SECTION, "core"))
    if config.dropout or softmax != e:
        name = "output of softmax's dropout" if config.dropout else "attention weights in bfloat16"
        terms.append(Term(name, e * scores, f"{e}as²b{over}", SECTION, "core"))
    return terms


def _latent_terms(config: Config) -> list[Term]:
    """The latents of queries, and of keys and values, before and after their norm."""
    model, e = config.model, config.element_bytes
    if not model.kv_latent:
        return []
    size = Fraction(e * config.tokens * (2 * (model.query_latent + model.kv_latent) + model.rope_width))
    name, formula = "latents of queries, keys and values", f"{e}sb(2q'+2c+r)"
    return [Term(name, size, formula, LATENT, "attention", "before and after their norms")]


def _expert_terms(config: Config) -> list[Term]:
    """What the router keeps, and the rows as each expert reads and gives them. The rows go to their experts
    in another order, so that they are there once more; their outputs are kept to be weighed.
    """
    model, e, rows = config.model, config.element_bytes, config.expert_rows
    if not model.experts:
        return []
    scores, hidden, weights, choice, token = ROUTING[model.router]
    count = Fraction(config.tokens * (scores * model.experts + hidden * model.hidden + token))
    count += weights * model.experts * model.hidden + (choice + e) * rows + 4 * (model.experts // config.ep)
    weighed = "before they are weighed"
    kept = "inputs of the experts" if config.score_before_experts else "outputs of the experts"
    note, wide = f"{float(rows / config.tokens):.4g} rows a token", e * rows * model.hidden
    return [
        Term("scores and choices of the router", count, f"4sbE + {choice + e}sbk", EXPERTS, "mlp"),
        Term("inputs of the experts", wide, f"{e}sbkh", EXPERTS, "mlp", note),
        Term(f"{kept} in float32", 4 * rows * model.hidden, "4sbkh", EXPERTS, "mlp", weighed)
        if config.score_before_experts or config.weigh_float32
        else Term(kept, wide, f"{e}sbkh", EXPERTS, "mlp", weighed),
    ]


def _qk_norm(config: Config, queries: Fraction, keys: Fraction, over: str) -> list[Term]:
    if not config.model.qk_norm:
        return []
    size, name = config.element_bytes * (queries + keys), BEFORE_NORM
    return [Term(name, size, f"{config.element_bytes}sb(a+k)d{over}", GROUPED, "attention")]


def _ffn(config: Config, factor: int, over: str) -> str:
    model = config.model
    if model.experts:
        return f"{factor}sb{'(k+1)' if model.shared_experts else 'k'}f{over}"
    return f"{4 * factor}sbh{over}" if model.ffn == 4 * model.hidden else f"{factor}sbf{over}"


def _activation_terms(config: Config, inner: Fraction, over: str) -> list[Term]:
    e = config.element_bytes
    if config.model.mlp == "gelu":
        terms = [Term("input of GELU", e * inner, _ffn(config, e, over), SECTION, "mlp")]
        if config.unfused_mlp:
            size, note = e * SEPARATE["gelu"], "only where its tanh is written out in separate operations"
            terms.append(
                Term("operations of GELU", size * inner, _ffn(config, size, over), SECTION, "mlp", note)
            )
        return terms
    if config.model.mlp == "relu":  # its backward reads its output, which the last layer keeps
        return []
    if config.model.mlp == "squared-relu":
        note = "relu keeps its output, which is the square's input"
        return [Term("input of the square", e * inner, _ffn(config, e, over), SQUARED, "mlp", note)]
    terms = [Term("gate and up projections", 2 * e * inner, _ffn(config, 2 * e, over), SWIGLU, "mlp")]
    if config.unfused_mlp:
        size, note = e * GATED[config.model.mlp], "only where SwiGLU is separate operations"
        terms.append(Term("silu(gate)", size * inner, _ffn(config, size, over), SWIGLU, "mlp", note))
    return terms


def checkpoint_term(config: Config) -> Term:
    """What full recomputation keeps of a layer: its input (2205.05198, Section 5), split among the ranks
    under P_a (1910.02054, Section 6.1).
    """
    own = layer_terms(config)[0]
    source = f"{KORTHIKANTI} Sec. 5"
    if config.partition_activations:
        split, source = own.bytes / config.tp, "arXiv 1910.02054 Sec. 6.1 (P_a)"
        return Term("input of the layer", split, f"{own.formula}/t", source, "input")
    return Term("input of the layer", own.bytes, own.formula, f"{source} (Table 2, row 6)", "input")


def operation_terms(config: Config) -> list[Term]:
    """What torchtitan's per-operation recomputation keeps of a layer: its input, attention's output, and the
    outputs of every second matrix product (q, v, and of the MLP the first and, where there are three, the
    last). Products of NVFP4 are operations of torchao, which it does not know.
    """
    model, e = config.model, config.element_bytes
    over, over_t = _over(config.replication), _over(config.tp)
    hidden = Fraction(config.tokens * model.hidden, config.replication)
    queries = Fraction(config.tokens * model.query_width, config.tp)
    values = Fraction(config.tokens * config.local_value_width)
    attended, inner = Fraction(config.tokens * model.output_width, config.tp), config.inner_elements
    attention = [
        Term("output of attention", e * attended, f"{e}sbh{over_t}", TORCHTITAN, "attention"),
        *(term for term in core_terms(config) if config.fused_attention),
    ]
    if config.scaling == "nvfp4":
        return [checkpoint_term(config), *attention]
    kept = [
        checkpoint_term(config),
        Term("queries", e * queries, f"{e}sbh{over_t}", TORCHTITAN, "attention"),
        Term("values", e * values, f"{e}sb(kd){over_t}", TORCHTITAN, "attention"),
        *attention,
        Term("output of the MLP's first product", e * inner, _ffn(config, e, over_t), TORCHTITAN, "mlp"),
    ]
    if model.mlp in GATED and not config.compile:  # nothing reads it in backward, as a compiler notices
        kept.append(Term("output of the MLP's last product", e * hidden, f"{e}sbh{over}", TORCHTITAN, "mlp"))
    if config.tp > 1:
        note = "outputs of the two reductions over tensor-parallel ranks"
        kept.append(Term("reduced outputs", 2 * e * hidden, f"{2 * e}sbh{over}", TORCHTITAN, "mlp", note))
    return kept


def kept_terms(config: Config) -> Sequence[tuple[Term, Fraction]]:
    """What the layers of a stage keep under the configured recomputation: each term, and the share of the
    layers that keep it.
    """
    found: dict[Term, Fraction] = {}
    for share, kind in config.kinds:
        for term, kept in _kept_terms(kind):
            found[term] = found.get(term, Fraction(0)) + share * kept
    return list(found.items())


def _kept_terms(config: Config) -> Sequence[tuple[Term, Fraction]]:
    """The same of a model with one kind of layers."""
    given = config.recompute
    if given == "none":
        return [(term, Fraction(1)) for term in layer_terms(config)]
    if given == "selective":  # all but the core (2205.05198, Section 5 and Equation 6)
        return [(term, Fraction(1)) for term in layer_terms(config) if term.part != "core"]
    if given == "selective-op":
        return [(term, Fraction(1)) for term in operation_terms(config)]
    if given == "full":
        return [(checkpoint_term(config), Fraction(1))]
    if given == "sqrt":
        checkpoint = checkpoint_term(config)
        note, source = f"segments of k = {segment_layers(config)} layers", "arXiv 1604.06174 Eq. 1"
        formula = f"{checkpoint.formula} / k"
        term = Term("inputs of the segments", checkpoint.bytes, formula, source, "input", note)
        return [(term, Fraction(-(-config.stage_layers // segment_layers(config)), config.stage_layers))]
    share = config.recomputed_share
    kept = [(term, 1 - share) for term in layer_terms(config) if share < 1]
    return [(checkpoint_term(config), share), *kept]


def segment_layers(config: Config) -> int:
    """Layers in a segment of sublinear checkpointing (1604.06174, Section 4.1): the k with the least bytes,
    about the square root.

    A stage then holds ceil(L/k) inputs for each micro-batch in flight and, during backward, the activations
    of k layers.
    """
    layers = config.stage_layers
    kept = checkpoint_term(config).bytes
    inner = config.mean_layer(lambda kind: total(layer_terms(kind))) - kept
    flying = min(config.pp, config.micro_batches)
    return min(range(1, layers + 1), key=lambda k: (flying * kept * -(-layers // k) + k * inner, k))
