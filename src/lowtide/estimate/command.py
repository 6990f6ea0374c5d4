"""The command ``lowtide estimate``. It imports no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from lowtide.budget import format_bytes, parse
from lowtide.errors import BudgetError
from lowtide.estimate.adapters import Quantize as Quantizes
from lowtide.estimate.config import Dtype as Dtypes
from lowtide.estimate.config import Update as Updates
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.losses import Loss as Losses
from lowtide.estimate.optimizers import Optimizer as Optimizers
from lowtide.estimate.settings import RUN_SETTINGS, SHAPE_SETTINGS
from lowtide.estimate.shape import Mlp

Switch = bool | None
_SMALLEST_MEMORY = 1 << 20
MODEL_HELP = (
    "22b, 175b, 530b, 1t (arXiv 2205.05198), gpt2*, llama*, mistral-7b, mixtral-8x7b, qwen*, deepseek-v3, "
    "gpt-oss-*, nemotron-15b, or a Hugging Face config.json."
)


def option(text: str, *names: str) -> Any:
    """An option whose default its help names, if there is one."""
    return typer.Option(*names, help=text, show_default=False)


ModelName = Annotated[str | None, option(MODEL_HELP)]
Layers = Annotated[int | None, option("Transformer layers (L).")]
Hidden = Annotated[int | None, option("Hidden size (h).")]
Heads = Annotated[int | None, option("Attention heads (a).")]
KvHeads = Annotated[int | None, option("Key-value heads. [default: the heads]")]
HeadWidth = Annotated[int | None, option("Width of a head. [default: hidden / heads]")]
Ffn = Annotated[
    int | None, option("Inner size of the MLP. [default: 4h; for swiglu 8h/3 up to a multiple of 256]")
]
Vocab = Annotated[int | None, option("Vocabulary (v). [default: 51200]")]
MlpKind = Annotated[Mlp | None, option("Kind of MLP. [default: gelu]")]
NormKind = Annotated[Literal["layernorm", "rmsnorm"] | None, option("Kind of norm. [default: layernorm]")]
Positions = Annotated[
    Literal["learned", "rotary"] | None, option("Kind of positions. [default: learned with gelu]")
]
Bias = Annotated[Switch, option("Biases of linear layers. [default: with gelu]", "--bias/--no-bias")]
Tied = Annotated[
    Switch,
    option(
        "Output layer shares the embedding. [default: the model's]", "--tied-embeddings/--untied-embeddings"
    ),
]
Experts = Annotated[
    int | None, option("Experts of a layer (a mixture), each of --ffn. [default: the model's]")
]
ExpertsPerToken = Annotated[int | None, option("Experts that each token goes to.")]
SharedExperts = Annotated[int | None, option("Experts beside these for every token. [default: the model's]")]
Ep = Annotated[
    int | None, option("Expert parallel size: of the d x c ranks, those that share the experts. [default: 1]")
]
Imbalance = Annotated[
    float | None, option("Tokens of the busiest expert-parallel rank over an average one's. [default: 1]")
]
ScoreBefore = Annotated[
    Switch, option("Experts' inputs are weighed, not their outputs (torchtitan).", "--score-before-experts")
]
Seq = Annotated[int | None, option("Tokens in a sequence (s). [default: the model's longest]")]
MicroBatch = Annotated[int | None, option("Sequences in a micro-batch (b). [default: 1]")]
GlobalBatch = Annotated[int | None, option("Sequences in a step (B). [default: micro-batch x dp x pp]")]
Tp = Annotated[int | None, option("Tensor parallel size (t). [default: 1]")]
SequenceParallel = Annotated[
    Switch,
    option("Split norms and dropouts along the sequence.", "--sequence-parallel/--no-sequence-parallel"),
]
Pp = Annotated[int | None, option("Pipeline stages (p). [default: 1]")]
Interleave = Annotated[int | None, option("Model chunks on a stage (m). [default: 1]")]
Dp = Annotated[int | None, option("Data parallel size (d). [default: 1]")]
Cp = Annotated[int | None, option("Context parallel size: ranks that share each sequence. [default: 1]")]
CpExchange = Annotated[
    Literal["ring", "all-gather", "all-to-all"] | None,
    option("How context-parallel ranks share keys and values; all-to-all is Ulysses'. [default: ring]"),
]
Zero = Annotated[
    int | None, option("ZeRO stage: 0, 1 (optimizer), 2 (and gradients), 3 (and weights: FSDP). [default: 0]")
]
Recompute = Annotated[
    str | None,
    option(
        "none; selective (Megatron's: the attention core); full; selective-op, selective-layer "
        "(torchtitan's); sqrt; or a number of layers of each stage. [default: none]"
    ),
]
Attention = Annotated[
    Literal["unfused", "fused", "flash-3"] | None,
    option(
        "fused keeps no scores; nor does flash-3 (FlashAttention 3, TransformerEngine's on Hopper), which is "
        "faster. [default: the model's; unfused with bare sizes, as in arXiv 2205.05198]"
    ),
]
Dropout = Annotated[float | None, option("Dropout probability. [default: the model's; 0.1 with bare sizes]")]
Dtype = Annotated[
    Dtypes | None,
    option(
        "Of weights and activations; autocast: float32 weights, bfloat16 products; mixed: float32 weights "
        "that FSDP casts where it gathers them; bf16-true: bfloat16 of the optimizer's state, too, without a "
        "float32 copy of the weights. [default: bf16]"
    ),
]
GradientDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"] | None,
    option("Of gradients. [default: fp32 without --zero (18 bytes a parameter), else the weights']"),
]
ReduceDtype = Annotated[
    Literal["auto", "bf16", "fp16", "fp32"] | None,
    option(
        "In which gradients are summed over data-parallel ranks (traffic only). [default: the gradients']"
    ),
]
Optimizer = Annotated[
    Optimizers | None,
    option(
        "8bit: states of one byte; paged: states leave the device but for the update (bitsandbytes). "
        "[default: adam]"
    ),
]
Update = Annotated[
    Updates | None,
    option(
        "How PyTorch updates: foreach takes one more copy of Adam's second moment. [default: foreach, its "
        "default; fused where there are master weights]"
    ),
]
Lora = Annotated[
    int | None,
    option("Rank of adapters beside frozen weights: LoRA. [default: none, all weights are trained]"),
]
LoraTargets = Annotated[
    str | None,
    option(
        "Linear layers with adapters: all-linear, attention, mlp, or of q,k,v,o,gate,up,down. "
        "[default: all-linear]"
    ),
]
LoraDtype = Annotated[
    Literal["fp32", "same"] | None,
    option(
        "Of adapters: fp32 (peft's: each casts and keeps its input), or the same as trained weights have. "
        "[default: fp32]"
    ),
]
LoraDropout = Annotated[float | None, option("Dropout of the adapters' inputs. [default: 0]")]
Dora = Annotated[Switch, option("DoRA: adapters with magnitudes.", "--dora")]
Quantize = Annotated[
    Quantizes | None, option("In what frozen matrices are kept: nf4 (QLoRA), int8 or fp8. [default: none]")
]
InBackward = Annotated[
    Switch,
    option("Each parameter is updated in backward, and its gradient freed.", "--optimizer-in-backward"),
]
OffloadOptimizer = Annotated[
    float | None, option("Fraction of optimizer and gradients on the host: 1 is ZeRO-Offload. [default: 0]")
]
PartitionActivations = Annotated[
    Switch, option("ZeRO-R's P_a: split kept layer inputs among tensor ranks.", "--partition-activations")
]
OffloadActivations = Annotated[Switch, option("Keep activations on the host.", "--offload-activations")]
Loss = Annotated[
    Losses | None,
    option(
        "Cross entropy: torch's on float32 logits, on logits as they are (torch-uncast), on a copy held "
        "beside them (upcast), transformers', in place (Megatron's and lowtide's; -copy: Unsloth's), torch's "
        "compiled, in --loss-chunks pieces of the tokens or the vocabulary with the output layer, or Liger's "
        "(fused-linear). [default: torch at t = 1, in-place above]"
    ),
]
LossChunks = Annotated[int | None, option("Pieces of a chunked loss. [default: 8]")]
Tiles = Annotated[
    int | None,
    option("Pieces of the tokens that the MLP, and a chunked loss, work on one by one (ALST). [default: 1]"),
]
FusedQkv = Annotated[Switch, option("Values keep all of one product of q, k and v (LitGPT).", "--fused-qkv")]
UnfusedNorms = Annotated[
    Switch, option("RMS norms in separate float32 operations, as transformers has them.", "--unfused-norms")
]
UnfusedMlp = Annotated[
    Switch, option("SwiGLU in separate operations, which also keep silu(gate).", "--unfused-mlp")
]
KeepOutputs = Annotated[
    Switch,
    option("Stage outputs are not freed after sending (arXiv 2205.05198, App. B).", "--keep-output-tensors"),
]
KeepGathered = Annotated[
    Switch,
    option("Gathered inputs are kept under --sequence-parallel (DTensor, nanotron).", "--keep-gathered"),
]
GatherLogits = Annotated[
    Switch, option("Every tensor rank gathers all logits for the loss (Hugging Face).", "--gather-logits")
]
NoSync = Annotated[
    Switch,
    option("Gradients that ZeRO splits are whole until the last micro-batch (FSDP's no_sync).", "--no-sync"),
]
DdpBuckets = Annotated[
    Switch, option("DistributedDataParallel's buckets beside the gradients (its default).", "--ddp-buckets")
]
Compile = Annotated[
    Switch, option("Pointwise operations are fused, by torch.compile or by hand (times only).", "--compile")
]
Float8 = Annotated[Switch, option("The layers' products run in float8 (times only).", "--float8")]
OverlapTensor = Annotated[
    Switch,
    option(
        "Tensor-parallel collectives run beside products: tp_comm_overlap, asynchronous TP (times only).",
        "--overlap-tensor",
    ),
]
Reentrant = Annotated[
    Switch,
    option(
        "Recomputed layers run to their end, as Megatron's do; else they stop where backward has all that it "
        "needs (FLOPs and times).",
        "--reentrant",
    ),
]
AsPublished = Annotated[
    bool,
    typer.Option(
        "--as-published", help="Begin with the parallel sizes of the model's paper (22b, 175b, 530b, 1t)."
    ),
]
IterationTime = Annotated[
    float | None, option("Measured seconds of a step, for MFU and HFU.", "--iteration-time")
]
PeakTflops = Annotated[
    float | None,
    option("Peak TFLOP/s of one device, for MFU and HFU. [default: the --device's]", "--peak-tflops"),
]
DeviceName = Annotated[
    str | None, option("a100, h100, h200, ...: its memory and peak rate, and a prediction of the time.")
]
Memory = Annotated[
    str | None, option("Memory of a device: 80GiB, or 80GB, which is 74.5GiB. [default: the --device's]")
]
FromHf = Annotated[
    Path | None,
    option(
        "A Hugging Face config.json or its folder, of any architecture: by formula where one fits, else "
        "traced on fake tensors as transformers builds it (needs torch); says which.",
        "--from-hf",
    ),
]
ConfigFile = Annotated[
    Path | None, option("A JSON file with the flags' names as keys; flags go before it.", "--config")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print every line of every stage as CSV.")]
Plot = Annotated[Path | None, option("Draw the stages into this file (.png, .pdf, .svg; needs matplotlib).")]
StageOption = Annotated[int, typer.Option("--stage", help="Pipeline stage to show line by line.")]
Brief = Annotated[bool, typer.Option("--brief", help="Without the table of lines.")]


def parse_recompute(text: str | None) -> Any:
    """A recomputation choice as `Config` takes it: a name, or a number of layers."""
    return int(text) if text is not None and text.lstrip("-").isdigit() else text


def refuse_zero(given: dict[str, Any]) -> None:
    """Where a setting's 0 means its default, nobody means it by typing 0.

    Raises:
        EstimateError: it was typed.
    """
    for name in ("seq", "global_batch"):
        if given.get(name) == 0:
            raise EstimateError(
                f"--{name.replace('_', '-')}=0: a whole number of at least 1 is needed; leave it out for the "
                "default"
            )


def parse_memory(text: str) -> int:
    """The memory of a device in bytes.

    Raises:
        EstimateError: it is no size, or too small for any device: a number without its unit.
    """
    try:
        found = parse(text)
    except BudgetError:
        found = 0
    if found < _SMALLEST_MEMORY:
        raise EstimateError(
            f"--memory {text}: give the bytes of a device's memory with their unit, such as 80GB or 40GiB"
        )
    return found


def memory_note(text: str | None) -> str:
    """What to say where a card's name stands for its memory: a card sold with "80 GB" has 79.1 GiB.

    >>> memory_note("80GB")
    '80GB is 74.5 GiB (GB are powers of 1000, GiB of 1024): --device a100 has 79.1 GiB'
    >>> memory_note("80GiB")
    ''
    """
    asked = re.fullmatch(r"\s*([0-9]+)\s*gb\s*", text or "", re.IGNORECASE)
    if text is None or asked is None:
        return ""
    from lowtide.estimate.devices import DEVICES

    found = parse_memory(text)
    meant = [
        f": --device {card.name} has {format_bytes(card.memory_bytes)}"
        for card in DEVICES.values()
        if found < card.memory_bytes <= int(asked[1]) << 30
    ]
    return f"{text} is {format_bytes(found)} (GB are powers of 1000, GiB of 1024){''.join(meant[:1])}"


def estimate_command(
    model: ModelName = None,
    layers: Layers = None,
    hidden: Hidden = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_width: HeadWidth = None,
    ffn: Ffn = None,
    vocab: Vocab = None,
    mlp: MlpKind = None,
    norm: NormKind = None,
    positions: Positions = None,
    bias: Bias = None,
    tied: Tied = None,
    experts: Experts = None,
    experts_per_token: ExpertsPerToken = None,
    shared_experts: SharedExperts = None,
    seq: Seq = None,
    micro_batch: MicroBatch = None,
    global_batch: GlobalBatch = None,
    tp: Tp = None,
    sequence_parallel: SequenceParallel = None,
    pp: Pp = None,
    interleave: Interleave = None,
    dp: Dp = None,
    cp: Cp = None,
    cp_exchange: CpExchange = None,
    ep: Ep = None,
    imbalance: Imbalance = None,
    score_before_experts: ScoreBefore = None,
    zero: Zero = None,
    recompute: Recompute = None,
    attention: Attention = None,
    dropout: Dropout = None,
    dtype: Dtype = None,
    gradient_dtype: GradientDtype = None,
    optimizer: Optimizer = None,
    update: Update = None,
    optimizer_in_backward: InBackward = None,
    lora: Lora = None,
    lora_targets: LoraTargets = None,
    lora_dtype: LoraDtype = None,
    lora_dropout: LoraDropout = None,
    dora: Dora = None,
    quantize: Quantize = None,
    offload_optimizer: OffloadOptimizer = None,
    partition_activations: PartitionActivations = None,
    offload_activations: OffloadActivations = None,
    loss: Loss = None,
    loss_chunks: LossChunks = None,
    tiles: Tiles = None,
    fused_qkv: FusedQkv = None,
    unfused_norms: UnfusedNorms = None,
    unfused_mlp: UnfusedMlp = None,
    keep_output_tensors: KeepOutputs = None,
    keep_gathered: KeepGathered = None,
    gather_logits: GatherLogits = None,
    no_sync: NoSync = None,
    ddp_buckets: DdpBuckets = None,
    compile: Compile = None,
    float8: Float8 = None,
    overlap_tensor: OverlapTensor = None,
    reentrant: Reentrant = None,
    reduce_dtype: ReduceDtype = None,
    as_published: AsPublished = False,
    iteration_time: IterationTime = None,
    peak_tflops: PeakTflops = None,
    device: DeviceName = None,
    memory: Memory = None,
    config: ConfigFile = None,
    from_hf: FromHf = None,
    json_out: Json = False,
    csv_out: Csv = False,
    plot: Plot = None,
    stage: StageOption = 0,
    brief: Brief = False,
) -> None:
    """Estimate bytes, FLOPs and traffic of a training step by closed formulas. No GPU, no torch."""
    given = {name: value for name, value in locals().items() if name in SETTINGS and value is not None}
    if from_hf is not None:
        if model is not None or config is not None:
            raise EstimateError("--from-hf names the model: leave --model and --config out")
        from lowtide.estimate.hugging_face import no_formula

        model = str(from_hf)
        if why := no_formula(from_hf):
            return _traced(from_hf, why, given | {"recompute": recompute}, device, memory, json_out)
    found = make(
        model, given, config=config, as_published=as_published, recompute=recompute,
        iteration_time=iteration_time, peak_tflops=peak_tflops,
        device=device, memory=memory,
    )  # fmt: skip
    if json_out and csv_out:
        raise EstimateError("--json and --csv print different things: choose one")
    if not 0 <= stage < len(found.stages):
        raise EstimateError(f"--stage={stage}: choose a pipeline stage from 0 to {len(found.stages) - 1}")
    from lowtide.estimate import render

    if plot is not None:
        render.plot(found, plot)
    if json_out:
        typer.echo(json.dumps(found.to_json(), indent=1))
    elif csv_out:
        typer.echo(render.to_csv(found), nl=False)
    else:
        from rich.console import Console

        render.show(found, Console(), stage, lines=not brief, name=model)
        if from_hf is not None:
            typer.echo(f"found by formula: {from_hf} is of a type that has one")
        if note := memory_note(memory):
            typer.echo(f"note: {note}")


def _traced(
    path: Path, why: str, given: dict[str, Any], device: str | None, memory: str | None, json_out: bool
) -> None:
    """The estimate of a model without a formula."""
    from lowtide.estimate.devices import device as find_device
    from lowtide.estimate.fitted import fitted
    from lowtide.estimate.simulation.any_model import any_model

    room = parse_memory(memory) if memory else find_device(device).memory_bytes if device else None
    config, stage, parts = any_model(path, **{name: one for name, one in given.items() if one is not None})
    held = int(stage.cached_bytes * (1 + fitted()["reserved"]["plain"]))
    counts = ", ".join(f"{one.name}: {one.operations:,} operations" for one in parts)
    told = f"found by tracing on fake tensors ({counts}): {why}"
    fits = None if room is None else held <= room
    if json_out:
        more = {"parameters": stage.parameters, "reserved_bytes": held, "fits": fits, "found_by": told}
        typer.echo(json.dumps(stage.to_json() | more, indent=1))
        return
    from rich.console import Console

    from lowtide.estimate.render import line_table

    typer.echo(f"{path}: {stage.parameters:,} parameters, {config.micro_batch} x {config.seq:,} tokens")
    Console().print(line_table(stage))
    moments = ", ".join(f"{name} {format_bytes(size)}" for name, size in stage.moments.items())
    verdict = "" if room is None else f"; {'fits' if fits else 'does not fit'} {format_bytes(room)}"
    typer.echo(f"moments: {moments}; peak {format_bytes(stage.total_bytes)} ({stage.peak_at})")
    typer.echo(f"reserved: {format_bytes(held)}{verdict}")
    typer.echo(told)


SETTINGS = {*RUN_SETTINGS, *SHAPE_SETTINGS} - {"recompute"}
"""The parameters of a command that are settings as they are."""


def make(
    model: str | None,
    given: dict[str, Any],
    *,
    config: Path | None,
    as_published: bool,
    recompute: str | None,
    iteration_time: float | None,
    peak_tflops: float | None,
    device: str | None,
    memory: str | None,
) -> Any:
    """The estimate that the flags ask for."""
    from lowtide.estimate import configure, estimate, read_config
    from lowtide.estimate.devices import device as find_device

    refuse_zero(given)
    known = find_device(device) if device is not None else None
    given = dict(given)
    given["recompute"] = parse_recompute(recompute)
    given["iteration_seconds"] = iteration_time
    given["peak_flops"] = peak_tflops * 1e12 if peak_tflops is not None else known.flops if known else None
    given["memory_bytes"] = (
        parse_memory(memory) if memory is not None else known.memory_bytes if known else None
    )
    if iteration_time is not None and given["peak_flops"] is None:
        raise EstimateError("--iteration-time without a peak rate: give --peak-tflops or --device too")
    if as_published:
        given["as_published"] = True
    if config is not None:
        return estimate(read_config(config, model=model, **given), known)
    return estimate(configure(model, **given), known)
