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
        seq: tokens in a sequence (s); the model's longest where it is 0.
        micro_batch: sequences in a micro-batch (b).
        global_batch: sequences in an optimizer step (B); just enough to fill the pipeline where it is 0.
        tp, pp, dp, cp: tensor (t), pipeline (p), data (d) and context parallel size; the product is the
            number of devices. Context-parallel ranks share each sequence and, for ZeRO, count as
            data-parallel ones.
        ep: expert parallel size: ranks among the d x c that share a layer's experts, and send each other the
            tokens of theirs.
        cp_exchange: how context-parallel ranks share keys and values: around a ``ring``; each rank gathers
            all (``all-gather``); or each takes some heads of the sequence (``all-to-all``: Ulysses, ALST).
        head_chunks: slices of the heads that attention works on one after the other (UPipe, 2602.21196): it
            keeps its input and its output, and makes queries, keys and values of a slice again in backward.
        imbalance: tokens of the busiest expert-parallel rank over those of an average one.
        score_before_experts: experts' inputs are weighed, in float32, and not their outputs (torchtitan).
        weigh_float32: their outputs are weighed in float32 (prime-rl), not in their own dtype.
        sequence_parallel: whether norms and dropouts are split along the sequence (2205.05198, Section
            4.2.2).
        interleave: model chunks on a pipeline stage (m); 1 is plain 1F1B.
        zero: ZeRO's stage (1910.02054): 1 splits the optimizer over the data-parallel ranks, 2 gradients too,
            3 weights too (FSDP2's ``fully_shard``).
        recompute: ``none``; ``selective``: the attention core (2205.05198, Section 5; Megatron's
            ``--recompute-granularity selective``); ``full``: each layer from its input; ``selective-op``:
            every second matrix product is kept, and attention (torchtitan's ``selective_ac_option = "op"``);
            ``selective-layer``: every second layer in full (torchtitan's ``selective_ac_option = "2"``);
            ``sqrt``: segments of about the square root of the layers (1604.06174); or a number: that many
            layers of every stage in full, the rest kept.
        reentrant: recomputed layers run to their end (Megatron, DeepSpeed); else they stop at the last tensor
            that backward needs, before the MLP's last product (``torch.utils.checkpoint``'s
            ``use_reentrant=False``). Their outputs, and the outputs' gradients, stay until backward of the
            layer ends.
        attention: ``unfused`` keeps the quadratic score matrices; ``fused`` (PyTorch's, FlashAttention 2)
            keeps the output and one log-sum-exp a row; so do ``flash-1`` (FlashAttention 1, and kernels in
            Triton of 2023), which takes more time with long sequences, and ``flash-3`` (FlashAttention 3, or
            TransformerEngine's cuDNN on Hopper and later), which takes less time.
        dropout: probability. Only whether it is 0 matters: each dropout keeps a mask of one byte an element.
        dtype: of weights and activations. Below float32 the optimizer keeps a float32 master copy of the
            weights, but under ``bf16-true`` (Lightning's word): there weights, gradients and the optimizer's
            state are bfloat16, and nothing else is kept. ``autocast`` is float32 weights and residual stream
            with bfloat16 products. ``mixed`` is float32 weights that FSDP casts to bfloat16 where it gathers
            them (its ``MixedPrecision``; with ``zero=3``).
        gradient_dtype: ``auto`` is float32 where the optimizer is not split (18 bytes a parameter,
            2205.05198, Figure 1) and the weights' own where it is (16 bytes, 1910.02054) or has no master
            copy.
        reduce_dtype: in which sharded gradients are summed over the data-parallel ranks: FSDP's
            ``reduce_dtype``; ``auto`` is the gradients' own. Changes traffic, not bytes.
        optimizer: ``adam`` and ``adamw`` keep two values a parameter, ``momentum`` one, ``sgd`` none;
            ``adamw-8bit`` two of one byte, and a float32 scale for each block of 256; ``paged-adamw`` and
            ``paged-adamw-8bit`` leave the device but for the update.
        update: how an optimizer of PyTorch updates: ``foreach`` all parameters at once, for which Adam makes
            one more copy of its second moment; ``fused`` and ``for-loop`` without. ``auto`` is ``foreach``
            (PyTorch's default), and ``fused`` where there is a master copy (Megatron, DeepSpeed).
        optimizer_in_backward: each parameter is updated when its gradient is made, which is freed then.
        offload_optimizer: fraction of the optimizer (and of the gradients) on the host: 1 is ZeRO-Offload,
            between is Twin-Flow.
        offload_weights: the weights that ZeRO 3 splits, their gradients and the optimizer are on the host
            (``CPUOffloadPolicy`` of FSDP2, ``offload_param`` of DeepSpeed). A device has those that are
            gathered.
        partition_activations: layer inputs that every tensor-parallel rank holds alike are split among them
            (ZeRO-R's P_a).
        offload_activations: what is kept for backward lies on the host (with ``partition_activations``:
            P_a+cpu).
        lora: rank r of adapters beside the layers' linear layers, which alone are trained then; 0: all is.
            What is frozen has neither gradients nor state, and is float32 in ``fp32`` and ``mixed``, else
            of two bytes.
        lora_dtype: of the adapters' weights and state: ``fp32`` (peft's default: each adapter casts its own
            input, and keeps it), or ``same``: as without adapters, and inputs are shared.
        lora_targets: which linear layers have adapters: ``all-linear``, ``attention``, ``mlp``, or names of
            ``q,k,v,o,gate,up,down``.
        lora_dropout: probability of a dropout of the adapters' inputs. Only whether it is 0 matters: each
            adapter keeps its own input then, and a mask.
        dora: adapters with a magnitude of each output (2402.09353).
        quantize: in what the frozen matrices of the layers are kept (``nf4`` is QLoRA's, ``int8``, ``fp8``);
            each is cast back to be read.
        loss: how cross entropy is computed: a name of `lowtide.estimate.losses.LOSSES`. ``auto`` is
            ``torch`` at t = 1 and ``in-place`` above.
        loss_chunks: pieces of a chunked loss.
        tiles: pieces of a micro-batch's tokens that the MLP works on one after the other, each again in
            backward (ALST's TiledMLP, 2506.13996); a loss chunked over tokens takes as many.
        keep_gathered: under sequence parallelism a layer keeps its gathered inputs (DTensor, nanotron) rather
            than gather them again in backward (Megatron and lowtide).
        gather_logits: every tensor-parallel rank gathers the whole vocabulary's logits for the loss (plans of
            Hugging Face and others), rather than take its part of the loss.
        no_sync: gradients that ZeRO 2 and 3 would split are summed whole over a step's micro-batches, in
            ``reduce_dtype``, and reduced once (FSDP's ``no_sync``, which accelerate and the ``Trainer`` use).
        flat_parameters: under ZeRO 3 a layer's adapters lie in one flat parameter with its frozen weights
            (FSDP 1 that wraps layers, as LitGPT does), which requires gradients as a whole. All weights have
            sharded gradients then, which stay, and products keep their inputs.
        keep_weights: what autograd keeps of weights that ZeRO 3 gathered holds them until their backward
            (DeepSpeed without recomputation); FSDP frees them all the same.
        ddp_buckets: `DistributedDataParallel` without ``gradient_as_bucket_view`` (its default) sums
            gradients in buckets, which are as large as all of them and stay.
        compile: pointwise operations are fused, by `torch.compile` or by hand (Megatron-Core with
            TransformerEngine). Changes times, and the bytes of ``selective-op``.
        float8: the layers' matrix products run in float8. Changes times, not bytes.
        scaling: how these are scaled, in torchao's words: ``tensorwise`` (also TransformerEngine's),
            ``rowwise``, ``mxfp8``, or ``nvfp4``, which is float4. Changes times. ``selective-op`` keeps no
            products of ``nvfp4``, whose kernels it does not know.
        overlap_tensor: tensor-parallel collectives run beside the products (TransformerEngine's
            ``tp_comm_overlap``, torchtitan's asynchronous tensor parallelism). Changes times, not bytes.
        fused_qkv: values are a view of one product of q, k and v, which stays whole for them (LitGPT).
        unfused_norms: RMS norms in separate operations in float32 (transformers), which keep their input in
            float32 and what they divide it to.
        unfused_mlp: the MLP's activation in separate operations: SwiGLU keeps silu(gate) too, GELU with its
            tanh written out (``gelu_new``) three tensors more.
        keep_output_tensors: a stage's outputs are not freed after they were sent (2205.05198, Appendix B,
            before).
        iteration_seconds, peak_flops: measured time of a step, and peak FLOP/s of one device: for MFU and
            HFU.
        memory_bytes: memory of a device: says what is left, and how many micro-batches can be kept whole
            (2205.05198, Appendix C).

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
