"""FLOPs of an iteration (arXiv 2205.05198, Appendix A), and what share of the hardware's peak they are.

Matrix products only. Attention is counted whole, causal mask or not, as the paper does.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

from lowtide.errors import expect
from lowtide.estimate.adapters import adapted
from lowtide.estimate.config import Config, check_config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.shape import GATED


@dataclass(frozen=True, slots=True)
class Flops:
    """FLOPs of one optimizer step, all devices together.

    Attributes:
        model: forward and backward of the model, without recomputation: Equation 7.
        hardware: ``model`` and recomputation as the paper counts it: Equation 8 for selective recomputation.
        executed: ``model`` and recomputation as it runs. For selective recomputation Equation 8 counts three
            forwards of the attention core (12Bs²hL); one runs (4Bs²hL).
    """

    model: int
    hardware: int
    executed: int


def layer_flops(config: Config, sequences: int) -> int:
    """FLOPs of one layer's forward on ``sequences`` sequences: 24Bsh² + 4Bs²h in the paper's layer.

    >>> from lowtide.estimate.settings import configure
    >>> config = configure("22b")
    >>> s, h = 2048, 6144
    >>> layer_flops(config, 4) == 24 * 4 * s * h**2 + 4 * 4 * s**2 * h
    True
    """
    products = config.mean_layer(
        lambda kind: (
            sum(one.active for one in kind.model.matrices().values()) + kind.model.experts * kind.model.hidden
        )  # the router's
    )
    return int(2 * sequences * config.seq * products) + attention_flops(config, sequences)


def attention_flops(config: Config, sequences: int) -> int:
    """FLOPs of one attention core's forward: scores, and scores times values."""
    model = config.model
    return 2 * sequences * config.seq**2 * (model.query_width + model.output_width)


def logit_flops(config: Config, sequences: int) -> int:
    """FLOPs of the output layer's forward: 2Bshv."""
    return 2 * sequences * config.seq * config.model.hidden * config.model.vocab


def adapter_flops(config: Config, sequences: int) -> int:
    """FLOPs of the forward of one layer's adapters."""
    if not config.lora:
        return 0
    count = config.mean_layer(
        lambda kind: sum(one.rows * (one.inputs + one.outputs) * config.lora for one in adapted(kind, 1, 1))
    )
    return int(2 * sequences * config.seq * count)


def _active(config: Config, *names: str) -> int:
    """Elements of some linear layers of a layer that each token is multiplied with."""
    return sum(one.active for name, one in config.model.matrices().items() if name in names)


def recomputed_flops(config: Config, sequences: int) -> int:
    """FLOPs of the layers' forward that run again, of all layers."""
    model, layers = config.model, config.model.layers
    if config.recompute == "selective":
        return layers * attention_flops(config, sequences)
    if config.recompute == "selective-op":  # every second product: k, the output's, and half of the MLP's
        names = ("k", "o", "up") if model.mlp in GATED else ("k", "o", "down")
        names = (*names, "shared_up", "q_a", "kv_a")
        names = model.matrices() if config.scaling == "nvfp4" else names
        own = config.mean_layer(lambda kind: _active(kind, *names))
        return layers * int(2 * sequences * config.seq * own)
    last = int(
        2 * sequences * config.seq * config.mean_layer(lambda kind: _active(kind, "down", "shared_down"))
    )
    whole = config.recomputed_share * (layer_flops(config, sequences) + adapter_flops(config, sequences))
    return int(layers * (whole - config.early_share * last))


def tiled_flops(config: Config, sequences: int) -> int:
    """FLOPs of the MLPs' forward that runs again tile by tile, of all layers."""
    own = _active(config, "gate", "up", "down") if config.tiles > 1 else 0
    return config.model.layers * 2 * sequences * config.seq * own


def sliced_flops(config: Config, sequences: int) -> int:
    """FLOPs of queries, keys and values that are made again slice by slice, of all layers."""
    own = _active(config, "q", "k", "v") if config.head_chunks > 1 else 0
    return config.model.layers * 2 * sequences * config.seq * own


def iteration_flops(config: Config) -> Flops:
    """FLOPs of one step of the whole global batch.

    Example:
        >>> from lowtide.estimate.settings import configure
        >>> found = iteration_flops(configure("22b", as_published=True, recompute="selective"))
        >>> round(found.hardware / found.model, 3)  # 1 + s/6h, Equation 9
        1.052
    """
    check_config("iteration_flops", config)
    batch, layers = config.global_batch, config.model.layers
    layer, core = layer_flops(config, batch), attention_flops(config, batch)
    logits = logit_flops(config, batch)
    model = 3 * (layers * layer + logits)
    if config.lora:  # no weight's gradient but the adapters'
        adapters = adapter_flops(config, batch)
        model = layers * (2 * (layer - core) + 3 * core + 3 * adapters) + 2 * logits
    again = recomputed_flops(config, batch) + (logits if config.loss_form.again else 0)
    again += tiled_flops(config, batch) + sliced_flops(config, batch)
    extra = 2 * layers * core if config.recompute == "selective" else 0
    return Flops(model, model + again + extra, model + again)


def utilization(flops: int, seconds: float, devices: int, peak_flops: float) -> float:
    """FLOPs over what the devices could have done in the time: MFU of model FLOPs, HFU of hardware FLOPs.

    >>> utilization(3 * 10**15, 10.0, 2, 300e12)
    0.5

    Raises:
        EstimateError: a number is not above 0.
    """
    for name, given in (("seconds", seconds), ("devices", devices), ("peak_flops", peak_flops)):
        above = isinstance(given, Real) and given > 0
        expect(above, f"utilization({name}=)", given, "a number above 0", EstimateError)
    return flops / (seconds * devices * peak_flops)
