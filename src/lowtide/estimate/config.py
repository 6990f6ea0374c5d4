"""What is estimated: a model, and how it is trained. Checked as a whole, so that what follows can rely on
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from lowtide.errors import expect
from lowtide.estimate.adapters import Quantize
from lowtide.estimate.checks import Ways, check_together
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.losses import LOSSES, Form, Loss
from lowtide.estimate.optimizers import OPTIMIZERS, Optimizer
from lowtide.estimate.shape import Shape, check_size, kv_heads_per_rank

Recompute = Ways | int
Attention = Literal["unfused", "flash-1", "fused", "flash-3"]
Dtype = Literal["bf16", "bf16-true", "fp16", "fp32", "autocast", "mixed"]
GradientDtype = Literal["auto", "bf16", "fp16", "fp32"]
Exchange = Literal["ring", "all-gather", "all-to-all"]
Scaling = Literal["tensorwise", "rowwise", "mxfp8", "nvfp4"]
Update = Literal["auto", "fused", "foreach", "for-loop"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3), "attention": get_args(Attention), "dtype": get_args(Dtype),
    "gradient_dtype": get_args(GradientDtype), "reduce_dtype": get_args(GradientDtype),
    "optimizer": get_args(Optimizer), "update": get_args(Update), "quantize": get_args(Quantize),
    "lora_dtype": ("fp32", "same"), "cp_exchange": get_args(Exchange), "loss": get_args(Loss),
    "scaling": get_args(Scaling),
}  # fmt: skip
_SIZES = {
    "seq": 1 << 30, "micro_batch": 1 << 20, "tp": 1 << 14, "pp": 1 << 14, "interleave": 1 << 10,
    "dp": 1 << 20, "cp": 1 << 14, "ep": 1 << 14, "loss_chunks": 1 << 20, "tiles": 1 << 20, "lora": 1 << 16,
    "head_chunks": 1 << 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A model and how it is trained; each setting is also a flag of ``lowtide estimate``.

    Attributes:
        model: the shape.
        seq: tokens in a sequence (s); 0 is the model's longest.
        micro_batch: sequences in a microbatch (b).
        global_batch: sequences in an optimizer step (B); 0 is ``micro_batch * dp * pp``.
        tp, pp, dp, cp: tensor (t), pipeline (p), data (d) and context parallel size. Their product is the
            number of devices. Context-parallel ranks share each sequence. ZeRO counts them as data-parallel
            ranks.
        ep: expert parallel size: the number of ranks that share the experts of a layer. These ranks exchange
            tokens. It divides ``dp * cp``.
        cp_exchange: how context-parallel ranks exchange keys and values. ``ring``: they pass them around.
            ``all-gather``: each rank gathers all of them. ``all-to-all``: each rank takes some heads of the
            whole sequence (DeepSpeed Ulysses, ALST).
        head_chunks: slices of the heads that attention works on one after the other (UPipe, 2602.21196): it
            keeps its input and its output, and makes queries, keys and values of a slice again in backward.
        imbalance: tokens of the expert-parallel rank with the most tokens, divided by the mean.
        score_before_experts: the router's scores multiply the inputs of experts, in float32, and not their
            outputs (torchtitan).
        weigh_float32: the router's scores multiply the outputs of experts in float32 (prime-rl).
        sequence_parallel: whether norms and dropouts are split along the sequence (2205.05198, Section
            4.2.2).
        interleave: model chunks on each pipeline stage (m); 1 is 1F1B without interleaving.
        zero: ZeRO's stage (1910.02054): 1 splits the optimizer over the data-parallel ranks, 2 gradients too,
            3 weights too (FSDP2's ``fully_shard``).
        recompute: ``none``; ``selective``: the attention core (2205.05198, Section 5; Megatron's
            ``--recompute-granularity selective``); ``full``: each layer from its input; ``selective-op``:
            every second matrix product is kept, and attention (torchtitan's ``selective_ac_option = "op"``);
            ``selective-layer``: every second layer in full (torchtitan's ``selective_ac_option = "2"``);
            ``sqrt``: segments of about the square root of the layers (1604.06174); or a number: that many
            layers of every stage in full, the rest kept.
        reentrant: a recomputed layer runs to its end (Megatron, DeepSpeed). Its output, and the output's
            gradient, stay until the layer's backward ends. Without it, recomputation stops at the last tensor
            that backward needs, before the MLP's last product (``use_reentrant=False`` of
            ``torch.utils.checkpoint``).
        attention: ``unfused`` keeps the quadratic score matrices. ``fused`` (PyTorch's, FlashAttention 2)
            keeps the output and one log-sum-exp a row. ``flash-1`` and ``flash-3`` keep the same. ``flash-1``
            (FlashAttention 1, and Triton kernels of 2023) takes more time with long sequences. ``flash-3``
            (FlashAttention 3, or cuDNN of TransformerEngine, on Hopper and later) takes less time.
        dropout: dropout probability. Bytes depend only on whether it is 0: each dropout keeps a mask of one
            byte an element.
        dtype: of weights and activations. With ``bf16`` and ``fp16`` the optimizer also keeps float32 weights
            (master weights). ``bf16-true`` (a name of Lightning) has bfloat16 weights, gradients and
            optimizer state, and no master weights. ``autocast`` has float32 weights and a float32 residual
            stream, and bfloat16 products. ``mixed`` has float32 weights that FSDP casts to bfloat16 when it
            gathers them (``MixedPrecision``; with ``zero=3``).
        gradient_dtype: ``auto`` is float32 if there are master weights and the optimizer is not split (18
            bytes a parameter, 2205.05198, Figure 1). Otherwise it is the dtype of the weights (16 bytes,
            1910.02054).
        reduce_dtype: dtype in which data-parallel ranks sum sharded gradients (``reduce_dtype`` of FSDP);
            ``auto`` is the dtype of the gradients. It changes traffic, not bytes.
        optimizer: ``adam`` and ``adamw`` keep two values a parameter, ``momentum`` one, ``sgd`` none.
            ``adamw-8bit`` keeps two values of one byte, and a float32 scale for each block of 256. The state
            of ``paged-adamw`` and ``paged-adamw-8bit`` is on the device during the update only.
        update: how an optimizer of PyTorch updates. ``foreach`` updates all parameters at once; Adam then
            makes one copy of its second moment. ``fused`` and ``for-loop`` make no copy. ``auto`` is
            ``fused`` with master weights (Megatron, DeepSpeed), else ``foreach`` (PyTorch's default).
        optimizer_in_backward: backward updates each parameter when its gradient is made, and frees the
            gradient.
        offload_optimizer: fraction of the optimizer state and of the gradients on the host. 1 is
            ZeRO-Offload, a smaller fraction is Twin-Flow.
        offload_weights: the weights that ZeRO 3 splits, their gradients and the optimizer state are on the
            host (``CPUOffloadPolicy`` of FSDP2, ``offload_param`` of DeepSpeed). The device has only gathered
            weights.
        partition_activations: kept layer inputs are split among the tensor-parallel ranks (P_a of ZeRO-R).
        offload_activations: saved activations are on the host (with ``partition_activations``: P_a+cpu).
        lora: rank r of adapters of the layers' linear layers; 0 is no adapters. With adapters all other
            weights are frozen: they have neither gradients nor optimizer state. Frozen weights are float32 in
            ``fp32`` and ``mixed``, else of two bytes.
        lora_dtype: of the adapters' weights and state. ``fp32`` is peft's default: each adapter casts its
            input, and keeps the cast copy. ``same`` is the dtype of trained weights without adapters:
            adapters share inputs.
        lora_targets: the linear layers that have adapters: ``all-linear``, ``attention``, ``mlp``, or names
            of ``q,k,v,o,gate,up,down``.
        lora_dropout: dropout probability on the inputs of adapters. Bytes depend only on whether it is 0:
            with dropout each adapter keeps its own input and a mask.
        dora: adapters also have a magnitude for each output (2402.09353).
        quantize: format of the layers' frozen matrices (``nf4`` is QLoRA's, ``int8``, ``fp8``). A matrix is
            cast back before it is read.
        loss: how cross entropy is computed: a name of `lowtide.estimate.losses.LOSSES`. ``auto`` is ``torch``
            at t = 1, else ``in-place``.
        loss_chunks: number of pieces of a chunked loss.
        tiles: number of pieces of a microbatch's tokens. The MLP processes them one after another, and
            recomputes each in backward (TiledMLP of ALST, 2506.13996). A loss that is chunked over tokens has
            as many pieces.
        keep_gathered: with sequence parallelism a layer keeps the inputs that it has gathered (DTensor,
            nanotron). Without it, backward gathers them again (Megatron, lowtide).
        gather_logits: each tensor-parallel rank gathers the logits of the whole vocabulary for the loss
            (plans of Hugging Face). Without it, each rank computes its part of the loss.
        no_sync: gradients that ZeRO 2 and 3 would split stay whole until the last microbatch of a step. They
            are summed in ``reduce_dtype``, and reduced once (``no_sync`` of FSDP, which accelerate and the
            ``Trainer`` use).
        flat_parameters: with ZeRO 3, the adapters and the frozen weights of a layer are in one flat parameter
            (FSDP 1 around layers, LitGPT). The flat parameter requires gradients: all weights then have
            sharded gradients, and products keep their inputs.
        embedding_unit: with ZeRO 3, the embedding is gathered by itself, and freed after its lookup
            (torchtitan since 2025, prime-rl). Without it, the embedding stays gathered with the output layer.
            Tied embeddings cannot be a unit.
        keep_weights: weights that ZeRO 3 gathers in forward stay until their backward, because autograd holds
            them (DeepSpeed without recomputation). FSDP frees them.
        ddp_buckets: gradients are summed in buckets, which have as many bytes as the gradients
            (`DistributedDataParallel` without ``gradient_as_bucket_view``, its default).
        compile: pointwise operations are fused, by `torch.compile` or by hand (Megatron-Core with
            TransformerEngine). It changes times, and the bytes of ``selective-op``.
        float8: the matrix products of layers run in float8. It changes times, not bytes.
        scaling: how float8 products are scaled, by torchao's names: ``tensorwise`` (also TransformerEngine),
            ``rowwise``, ``mxfp8``, or ``nvfp4`` (products in float4). It changes times. ``selective-op`` does
            not know the products of ``nvfp4``, and keeps none of them.
        overlap_tensor: tensor-parallel collectives run while products run (``tp_comm_overlap`` of
            TransformerEngine, asynchronous tensor parallelism of torchtitan). It changes times, not bytes.
        fused_qkv: the saved v is a view of one product of q, k and v, and keeps all of it (LitGPT).
        unfused_norms: RMS norms run as separate float32 operations (transformers). They keep their input in
            float32, and the normalized input.
        unfused_mlp: the MLP's activation runs as separate operations. SwiGLU also keeps silu(gate). GELU by
            its tanh formula (``gelu_new``) keeps three more tensors.
        keep_output_tensors: a stage keeps its outputs after it has sent them (2205.05198, Appendix B).
        iteration_seconds, peak_flops: measured time of a step, and peak FLOP/s of one device: for MFU and
            HFU.
        memory_bytes: memory of a device. The result then says how many bytes are left, and how many
            microbatches need no recomputation (2205.05198, Appendix C).

    Raises:
        EstimateError: something is out of range or does not divide; the message names the flag and what would
            be valid.
    """

    model: Shape
    seq: int = 0
    micro_batch: int = 1
    global_batch: int = 0
    tp: int = 1
    sequence_parallel: bool = False
    pp: int = 1
    interleave: int = 1
    dp: int = 1
    cp: int = 1
    cp_exchange: Exchange = "ring"
    head_chunks: int = 1
    ep: int = 1
    imbalance: float = 1.0
    score_before_experts: bool = False
    weigh_float32: bool = False
    zero: int = 0
    recompute: Recompute = "none"
    reentrant: bool = False
    attention: Attention = "unfused"
    dropout: float = 0.1
    dtype: Dtype = "bf16"
    gradient_dtype: GradientDtype = "auto"
    reduce_dtype: GradientDtype = "auto"
    optimizer: Optimizer = "adam"
    update: Update = "auto"
    optimizer_in_backward: bool = False
    lora: int = 0
    lora_targets: str = "all-linear"
    lora_dtype: Literal["fp32", "same"] = "fp32"
    lora_dropout: float = 0.0
    dora: bool = False
    quantize: Quantize = "none"
    offload_optimizer: float = 0.0
    offload_weights: bool = False
    partition_activations: bool = False
    offload_activations: bool = False
    loss: Loss = "auto"
    loss_chunks: int = 8
    tiles: int = 1
    fused_qkv: bool = False
    unfused_norms: bool = False
    unfused_mlp: bool = False
    keep_output_tensors: bool = False
    keep_gathered: bool = False
    gather_logits: bool = False
    no_sync: bool = False
    flat_parameters: bool = False
    embedding_unit: bool = False
    keep_weights: bool = False
    ddp_buckets: bool = False
    compile: bool = False
    float8: bool = False
    scaling: Scaling = "tensorwise"
    overlap_tensor: bool = False
    iteration_seconds: float | None = None
    peak_flops: float | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.seq == 0:
            object.__setattr__(self, "seq", self.model.sequence)
        for name, most in _SIZES.items():
            check_size(flag(name), getattr(self, name), most, least=0 if name == "lora" else 1)
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known or isinstance(value, bool):
                raise EstimateError(f"{flag(name)}={value!r}: choose {', '.join(str(k) for k in known)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise EstimateError(f"{flag(field.name)}={value!r}: true or false is needed")
        for name, most, edge in (
            ("dropout", 1.0, "below 1"),
            ("lora_dropout", 1.0, "below 1"),
            ("offload_optimizer", 1.0 + 1e-12, "at most 1"),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < most:
                raise EstimateError(f"{flag(name)}={value!r}: a number of at least 0 and {edge} is needed")
        if isinstance(self.imbalance, bool) or not 1 <= self.imbalance < math.inf:
            raise EstimateError(f"--imbalance={self.imbalance!r}: a number of at least 1 is needed")
        for name in ("iteration_seconds", "peak_flops", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf
            ):
                raise EstimateError(f"{flag(name)}={value!r}: a number above 0 is needed")
        if self.global_batch == 0:
            object.__setattr__(self, "global_batch", self.micro_batch * self.dp * self.pp)
        check_size("--global-batch", self.global_batch, 1 << 40)
        check_together(self)

    @property
    def devices(self) -> int:
        """Number of devices: t p d and the context-parallel size."""
        return self.tp * self.pp * self.shards

    @property
    def shards(self) -> int:
        """Ranks among which ZeRO splits a stage's states: data- and context-parallel ones."""
        return self.dp * self.cp

    @property
    def kinds(self) -> tuple[tuple[Fraction, Config], ...]:
        """The kinds of layers: of each its share of every stage's layers, and a configuration of a model that
        has no others.
        """
        if not self.model.dense_layers:
            return ((Fraction(1), self),)
        none: dict[str, Any] = dict(ep=1, imbalance=1.0, score_before_experts=False, weigh_float32=False)
        kinds = self.model.kinds
        return tuple(
            (share, replace(self, model=one, **({} if one.experts else none))) for share, one in kinds
        )

    def mean_layer(self, what: Callable[[Config], Any]) -> Fraction:
        """Something of a layer, on average over the kinds of layers."""
        if not self.model.dense_layers:
            return Fraction(what(self))
        return sum((share * Fraction(what(kind)) for share, kind in self.kinds), Fraction(0))

    @property
    def expert_rows(self) -> Fraction:
        """Rows that the experts of one rank work on: the tokens of a micro-batch, each as often as it goes to
        an expert.
        """
        uneven = Fraction(self.imbalance if self.ep > 1 else 1)
        return uneven * self.tokens * self.model.experts_per_token

    @property
    def inner_elements(self) -> Fraction:
        """Elements of the MLP's inner tensors on one rank."""
        model = self.model
        rows = self.expert_rows + self.tokens * model.shared_experts if model.experts else self.tokens
        return Fraction(rows * model.ffn, self.tp)

    @property
    def loss_kind(self) -> str:
        """What ``auto`` stands for, or ``loss`` itself."""
        return self.loss if self.loss != "auto" else "torch" if self.tp == 1 else "in-place"

    @property
    def loss_form(self) -> Form:
        """How the loss is computed."""
        return LOSSES[self.loss_kind]

    @property
    def chunks(self) -> int:
        """Pieces that the loss is computed in. ``fused-linear`` (Liger) takes as many as make a piece's
        logits about as large as the hidden states.
        """
        if self.loss_kind == "fused-linear":
            return -(-self.model.vocab // self.model.hidden)
        tiled = self.tiles > 1 and self.loss_form.pieces == "tokens"
        return self.tiles if tiled else self.loss_chunks if self.loss_form.pieces else 1

    @property
    def update_kind(self) -> str:
        """What ``auto`` stands for, or ``update`` itself."""
        return self.update if self.update != "auto" else "fused" if self.master_bytes else "foreach"

    @property
    def recomputed_share(self) -> Fraction:
        """Share of the layers that are recomputed in full."""
        if self.recompute in ("full", "sqrt"):
            return Fraction(1)
        if self.recompute == "selective-layer":
            return Fraction(1, 2)
        return Fraction(self.recompute, self.stage_layers) if isinstance(self.recompute, int) else Fraction(0)

    @property
    def early_share(self) -> Fraction:
        """Share of the layers whose recomputation stops before the last product of the MLP."""
        return Fraction(0) if self.reentrant or self.recompute == "sqrt" else self.recomputed_share

    @property
    def fused_attention(self) -> bool:
        """Whether one kernel computes attention and keeps no scores."""
        return self.attention != "unfused"

    @property
    def micro_batches(self) -> int:
        """Micro-batches that each pipeline works through in a step."""
        return self.global_batch // (self.micro_batch * self.dp)

    @property
    def stage_layers(self) -> int:
        """Layers on each pipeline stage."""
        return self.model.layers // self.pp

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one context-parallel rank: s b where there is one."""
        return self.seq * self.micro_batch // self.cp

    @property
    def replication(self) -> int:
        """By how much tensors between the parallel regions are split: t under sequence parallelism, else
        1.
        """
        return self.tp if self.sequence_parallel else 1

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that matrix products work on."""
        return 4 if self.dtype == "fp32" else 2

    @property
    def residual_bytes(self) -> int:
        """Bytes of an element of the residual stream, which autocast leaves in float32."""
        return 4 if self.dtype in ("fp32", "autocast") else 2

    @property
    def weight_bytes(self) -> int:
        """Bytes of a weight that is trained."""
        return 4 if self.dtype == "mixed" or self.single_adapters else self.residual_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of a weight as FSDP gathers it."""
        return self.residual_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a gradient."""
        if self.gradient_dtype == "auto":
            whole = self.zero == 0 and self.offload_optimizer == 0 and not self.lora
            return 4 if whole and self.dtype != "bf16-true" else self.weight_bytes
        return 4 if self.gradient_dtype == "fp32" else 2

    @property
    def frozen_bytes(self) -> int:
        """Bytes of a frozen weight that is not quantised."""
        return 4 if self.dtype in ("fp32", "mixed") else 2

    @property
    def single_adapters(self) -> bool:
        """Whether there are adapters in float32."""
        return self.lora > 0 and self.lora_dtype == "fp32"

    @property
    def adapter_copies(self) -> int:
        """Bytes of an element of the input that each adapter has for itself; 0 where all read the layers'
        own. Under autocast products cast float32 inputs back; FSDP casts the adapters instead.
        """
        cast = self.single_adapters and self.dtype not in ("fp32", "mixed")
        if not cast and not self.lora_dropout:
            return 0
        return 4 if cast and self.dtype != "autocast" else self.element_bytes

    @property
    def gradients_resident(self) -> bool:
        """Whether gradients are there while a loss is computed: where earlier micro-batches left theirs, and
        where they have a buffer of their own: in another dtype than the weights (Megatron's), or of ZeRO 3
        beside master weights (DeepSpeed's).
        """
        buffer = self.gradient_bytes > self.weight_bytes or (self.zero == 3 and self.master_bytes > 0)
        several = self.micro_batches > 1 or self.flat_parameters
        return not self.optimizer_in_backward and (several or buffer)

    @property
    def reduced_bytes(self) -> int:
        """Bytes of a gradient as it is summed over the data-parallel ranks."""
        return {"auto": self.gradient_bytes, "fp32": 4}.get(self.reduce_dtype, 2)

    @property
    def master_bytes(self) -> int:
        """Bytes of a parameter's float32 master copy; 0 where the weights are that, or there is none."""
        return 4 if self.weight_bytes < 4 and self.dtype != "bf16-true" else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of an element of the optimizer's state, where it is not of 8 bits."""
        return 2 if self.dtype == "bf16-true" and not self.single_adapters else 4

    @property
    def optimizer_bytes(self) -> Fraction:
        """Bytes of optimizer state of a parameter, float32 master copy included."""
        form = OPTIMIZERS[self.optimizer]
        value = form.value_bytes or Fraction(self.state_bytes)
        return form.states * value + self.master_bytes

    @property
    def local_kv_width(self) -> int:
        """Elements of one token's keys on one tensor-parallel rank."""
        return kv_heads_per_rank(self.model.kv_heads, self.tp) * self.model.head_width

    @property
    def key_copies(self) -> int:
        """Context-parallel ranks that hold each head of keys and values where heads are exchanged for tokens:
        several with fewer of these heads than ranks.
        """
        heads = kv_heads_per_rank(self.model.kv_heads, self.tp)
        return -(-self.cp // heads) if self.cp_exchange == "all-to-all" else 1

    @property
    def local_value_width(self) -> int:
        """Elements of one token's values, with what keys share the product with, on one tensor-parallel
        rank.
        """
        model, heads = self.model, kv_heads_per_rank(self.model.kv_heads, self.tp)
        shared = model.head_width - model.rope_width if model.kv_latent else 0
        return heads * (model.value_width + shared)


def flag(name: str) -> str:
    """The flag of a setting.

    >>> flag("micro_batch")
    '--micro-batch'
    """
    special = {
        "iteration_seconds": "--iteration-time",
        "peak_flops": "--peak-tflops",
        "memory_bytes": "--memory",
        "sequence": "--seq",
    }
    return special.get(name, "--" + name.replace("_", "-"))


def check_config(function: str, config: Any) -> None:
    """Refuse what is no `Config`.

    Raises:
        EstimateError: it is none.
    """
    allowed = "what lowtide.estimate.configure(...) returns"
    expect(isinstance(config, Config), f"{function}(config=)", config, allowed, EstimateError)
