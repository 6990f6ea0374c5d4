"""What the two ends of the model keep: embedding, last norm, output layer and logits (arXiv 2205.05198,
Section 4.3), and stage outputs (Appendix B).
"""

from __future__ import annotations

from fractions import Fraction

from lowtide.estimate.config import Config
from lowtide.estimate.layer import AUTOCAST, TENSOR
from lowtide.estimate.lines import KORTHIKANTI, Line, Term
from lowtide.estimate.schedule import micro_batches_in_flight

SECTION = f"{KORTHIKANTI} Sec. 4.3"
LIGER = f"{SECTION}; fused linear cross entropy: 2410.10989 Sec. 3.2"


def loss_terms(config: Config) -> list[Term]:
    """What the last stage keeps behind its layers, of one micro-batch."""
    e, x, model, form = config.element_bytes, config.residual_bytes, config.model, config.loss_form
    hidden = Fraction(config.tokens * model.hidden, config.replication)
    over = "" if config.replication == 1 else "/t"
    logits = [_logits(config)]
    if form.pieces:
        note = "" if not form.again else "the logits of a chunk are recomputed in backward"
        name = "loss and its chunks' sums"
        logits = [Term(name, Fraction(4 * config.tokens), "4sb", SECTION, "loss", note)]
    if form.in_forward:
        logits = [] if reads_once(config) else logits
        made = "made in forward, piece by piece"
        if not config.lora:
            width = 4 if reads_once(config) else config.gathered_bytes
            size = Fraction(width * -(-model.vocab // config.tp) * model.hidden)
            note = "summed over the pieces, beside the others"
            logits.append(
                Term("gradient of the output layer's weight", size, f"{width}hv", LIGER, "loss", note)
            )
        logits.append(
            Term("gradient of the output layer's input", e * hidden, f"{e}sbh{over}", LIGER, "loss", made)
        )
    gathered = []
    if config.keep_gathered:
        more = e * Fraction(config.tokens * model.hidden * (config.tp - 1), config.tp)
        gathered.append(Term("gathered input of the output layer", more, f"{e}sbh(t-1)/t", TENSOR, "loss"))
    copies, inputs = output_layer_terms(config)
    return [
        *gathered,
        *([] if reads_once(config) else copies),
        Term("input of the last norm", x * hidden, f"{x}sbh{over}", SECTION, "loss"),
        *([] if reads_once(config) else [inputs]),
        *logits,
    ]


def reads_once(config: Config) -> bool:
    """Whether the output layer's operands are let go in forward, where all that is made of them is made."""
    return config.loss_form.in_forward == "wide"


def output_layer_terms(config: Config) -> tuple[list[Term], Term]:
    """What the output layer reads: a cast copy of its weight, if there is one, and its input."""
    e = config.element_bytes
    over, over_t = "" if config.replication == 1 else "/t", "" if config.tp == 1 else "/t"
    hidden = Fraction(config.tokens * config.model.hidden, config.replication)
    copies = []
    if config.dtype == "autocast" and not config.lora:
        size = Fraction(2 * -(-config.model.vocab // config.tp) * config.model.hidden)
        copies.append(Term("bfloat16 copy of the output layer", size, f"2hv{over_t}", AUTOCAST, "loss"))
    return copies, Term("input of the output layer", e * hidden, f"{e}sbh{over}", SECTION, "loss")


def _logits(config: Config) -> Term:
    """What autograd keeps of whole logits."""
    over = "" if config.gather_logits or config.tp == 1 else "/t"
    size, _ = loss_bytes(config)
    name = "logits in float32" if size != config.element_bytes else "logits"
    note = f"{config.loss_kind}: {config.loss_form.what}"
    return Term(name, size * logit_elements(config), f"{size}sbv{over}", SECTION, "loss", note)


def loss_bytes(config: Config) -> tuple[int, int]:
    """Bytes a logit that the loss keeps, and above that at its fullest moment: of a piece's logits where
    they are there piece by piece.

    >>> from lowtide.estimate.settings import configure
    >>> [loss_bytes(configure("llama3-8b", loss=kind)) for kind in ("torch", "in-place", "compiled")]
    [(4, 10), (4, 2), (2, 2)]
    """
    e, form = config.element_bytes, config.loss_form
    low = e if e < 4 else 0
    parallel = config.tp > 1 and not config.gather_logits
    return form.kept(e, low), form.above(e, low) + (form.parallel(e) if parallel else 0)


def logit_elements(config: Config) -> Fraction:
    """Logits of one micro-batch on one rank, at the loss."""
    return Fraction(config.tokens * -(-config.model.vocab // (1 if config.gather_logits else config.tp)))


def edge_lines(config: Config, stage: int) -> list[Line]:
    """The lines of a stage that do not belong to a layer."""
    over = "" if config.replication == 1 else "/t"
    flying = min(config.pp - stage, config.micro_batches)
    lines = []
    if stage == 0 and config.dropout:
        size = Fraction(config.tokens * config.model.hidden, config.replication)
        mask = Term("mask of the embedding's dropout", size, f"sbhp{over}", SECTION, "embedding")
        note = (
            "interleaving can hold up to 2p - 1 of them; the paper counts p" if config.interleave > 1 else ""
        )
        lines.append(mask.line(flying, note))
    if stage == config.pp - 1:
        lines += [term.line() for term in loss_terms(config)]
    if config.keep_output_tensors:
        e = config.residual_bytes
        size = Fraction(e * config.tokens * config.model.hidden, config.replication)
        name, source = "outputs sent to the next stage", f"{KORTHIKANTI} App. B"
        output = Term(name, size, f"{e}sbhr{over}", source, "output")
        lines.append(output.line(micro_batches_in_flight(config, stage)))
    return lines
