"""The command ``lowtide estimate``. It imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from lowtide.budget import format_bytes, parse
from lowtide.errors import BudgetError
from lowtide.estimate.adapters import Quantize as Quantizes
from lowtide.estimate.config import Dtype as Dtypes
from lowtide.estimate.config import Update as Updates
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.losses import Loss as Losses
from lowtide.estimate.optimizers import Optimizer as Optimizers
from lowtide.estimate.shape import Mlp

Switch = bool | None
_SMALLEST_MEMORY = 1 << 20
MODEL_HELP = (
    "22b, 175b, 530b, 1t (arXiv 2205.05198), gpt*, llama*, mistral-7b, mixtral-8x*, qwen*, gemma-*, phi-*, "
    "falcon-*, deepseek-v3, gpt-oss-*, ..., hf:TYPE[:key=value,...], or a Hugging Face config.json."
)


def option(text: str, *names: str) -> Any:
    """An option whose default its help names, if there is one."""
    return typer.Option(*names, help=text, show_default=False)


FLAGS: dict[str, Any] = {
    "model": Annotated[str | None, option(MODEL_HELP)],
    "layers": Annotated[int | None, option("Transformer layers (L).")],
    "hidden": Annotated[int | None, option("Hidden size (h).")],
    "heads": Annotated[int | None, option("Attention heads (a).")],
    "kv_heads": Annotated[int | None, option("Key-value heads. [default: as many as --heads]")],
    "head_width": Annotated[int | None, option("Width of a head. [default: hidden / heads]")],
    "ffn": Annotated[
        int | None,
        option("Inner size of the MLP. [default: 4h; with swiglu 8h/3, rounded up to a multiple of 256]"),
    ],
    "vocab": Annotated[int | None, option("Vocabulary (v). [default: 51200]")],
    "mlp": Annotated[Mlp | None, option("Kind of MLP. [default: gelu]")],
    "norm": Annotated[Literal["layernorm", "rmsnorm"] | None, option("Kind of norm. [default: layernorm]")],
    "positions": Annotated[
        Literal["learned", "rotary"] | None,
        option("Kind of position encoding. [default: learned with --mlp gelu, else rotary]"),
    ],
    "bias": Annotated[
        Switch,
        option(
            "Whether linear layers have biases. [default: yes with --mlp gelu, else no]", "--bias/--no-bias"
        ),
    ],
    "tied": Annotated[
        Switch,
        option(
            "Whether the output layer shares the embedding's weights. [default: the model's]",
            "--tied-embeddings/--untied-embeddings",
        ),
    ],
    "experts": Annotated[
        int | None,
        option(
            "Routed experts in each layer of a mixture; --ffn is the inner size of each. [default: the "
            "model's]"
        ),
    ],
    "experts_per_token": Annotated[
        int | None, option("Routed experts that work on each token. [default: the model's]")
    ],
    "shared_experts": Annotated[
        int | None,
        option("Experts that work on every token, in addition to the routed ones. [default: the model's]"),
    ],
    "ep": Annotated[
        int | None,
        option(
            "Expert parallel size: the number of ranks that share the experts of a layer. It divides dp x "
            "cp. [default: 1]"
        ),
    ],
    "imbalance": Annotated[
        float | None,
        option("Tokens of the expert-parallel rank with the most tokens, divided by the mean. [default: 1]"),
    ],
    "score_before_experts": Annotated[
        Switch,
        option(
            "The router's scores multiply the inputs of experts, not their outputs (torchtitan).",
            "--score-before-experts",
        ),
    ],
    "weigh_float32": Annotated[
        Switch,
        option(
            "The router's scores multiply the outputs of experts in float32 (prime-rl).", "--weigh-float32"
        ),
    ],
    "seq": Annotated[int | None, option("Tokens in a sequence (s). [default: the model's longest]")],
    "micro_batch": Annotated[int | None, option("Sequences in a microbatch (b). [default: 1]")],
    "global_batch": Annotated[
        int | None, option("Sequences in an optimizer step (B). [default: microbatch x dp x pp]")
    ],
    "tp": Annotated[int | None, option("Tensor parallel size (t). [default: 1]")],
    "sequence_parallel": Annotated[
        Switch,
        option(
            "Split norms and dropouts along the sequence among the --tp ranks.",
            "--sequence-parallel/--no-sequence-parallel",
        ),
    ],
    "pp": Annotated[int | None, option("Pipeline stages (p). [default: 1]")],
    "interleave": Annotated[int | None, option("Model chunks on each pipeline stage (m). [default: 1]")],
    "dp": Annotated[int | None, option("Data parallel size (d). [default: 1]")],
    "cp": Annotated[
        int | None,
        option("Context parallel size: the number of ranks that share each sequence. [default: 1]"),
    ],
    "cp_exchange": Annotated[
        Literal["ring", "all-gather", "all-to-all"] | None,
        option(
            "How context-parallel ranks exchange keys and values; all-to-all is DeepSpeed Ulysses. [default: "
            "ring]"
        ),
    ],
    "head_chunks": Annotated[
        int | None,
        option(
            "Slices of the heads that attention works on one by one, with queries, keys and values of each "
            "made again in backward (UPipe). [default: 1]"
        ),
    ],
    "zero": Annotated[
        int | None,
        option(
            "ZeRO stage: 0 splits nothing; 1 splits the optimizer state; 2 also gradients; 3 also weights "
            "(FSDP). [default: 0]"
        ),
    ],
    "recompute": Annotated[
        str | None,
        option(
            "What backward recomputes. none; selective: the attention core (Megatron); full: every layer; "
            "selective-op and selective-layer: as in torchtitan; sqrt: segments of about sqrt(L) layers; a "
            "number: that many layers of each stage. [default: none]"
        ),
    ],
    "attention": Annotated[
        Literal["unfused", "flash-1", "fused", "flash-3"] | None,
        option(
            "unfused keeps the attention scores; the others do not. fused: FlashAttention 2. flash-1: "
            "kernels of 2023, slower with long sequences. flash-3: faster kernels for Hopper (FlashAttention "
            "3, TransformerEngine). [default: the model's; unfused if the model is given by sizes, as in "
            "arXiv 2205.05198]"
        ),
    ],
    "dropout": Annotated[
        float | None,
        option("Dropout probability. [default: the model's; 0.1 if the model is given by sizes]"),
    ],
    "dtype": Annotated[
        Dtypes | None,
        option(
            "Of weights and activations. bf16 and fp16: the optimizer also keeps float32 weights (master "
            "weights). bf16-true: no master weights, and an optimizer state in bfloat16. autocast: float32 "
            "weights and residual stream, bfloat16 products. mixed: float32 weights that FSDP2's "
            "MixedPrecisionPolicy casts when it gathers them, and a bfloat16 residual stream. [default: bf16]"
        ),
    ],
    "gradient_dtype": Annotated[
        Literal["auto", "bf16", "fp16", "fp32"] | None,
        option(
            "Dtype of gradients. [default: fp32 with master weights and --zero 0 (18 bytes a parameter), "
            "else the weights' dtype]"
        ),
    ],
    "reduce_dtype": Annotated[
        Literal["auto", "bf16", "fp16", "fp32"] | None,
        option(
            "Dtype in which data-parallel ranks sum gradients; changes traffic only. [default: the "
            "gradients' dtype]"
        ),
    ],
    "optimizer": Annotated[
        Optimizers | None,
        option(
            "Names with 8bit: a state of one byte a value. Names with paged: the state is on the device "
            "during the update only (bitsandbytes). [default: adam]"
        ),
    ],
    "update": Annotated[
        Updates | None,
        option(
            "Implementation of the update in torch.optim. foreach needs a temporary copy of Adam's second "
            "moment. [default: fused with master weights, else foreach]"
        ),
    ],
    "lora": Annotated[
        int | None,
        option(
            "Rank of LoRA adapters; the model's own weights are then frozen. [default: no adapters, all "
            "weights are trained]"
        ),
    ],
    "lora_targets": Annotated[
        str | None,
        option(
            "Linear layers that have adapters: all-linear, attention, mlp, or a list of "
            "q,k,v,o,gate,up,down. [default: all-linear]"
        ),
    ],
    "lora_dtype": Annotated[
        Literal["fp32", "same"] | None,
        option(
            "Dtype of adapters. fp32: peft's default, where each adapter keeps its own float32 input. same: "
            "the dtype that trained weights have without adapters. [default: fp32]"
        ),
    ],
    "lora_dropout": Annotated[
        float | None, option("Dropout probability on the inputs of adapters. [default: 0]")
    ],
    "dora": Annotated[
        Switch, option("Use DoRA: each adapter also has a magnitude for each output.", "--dora")
    ],
    "quantize": Annotated[
        Quantizes | None,
        option("Format of the frozen matrices: nf4 (QLoRA), int8 or fp8. [default: none]"),
    ],
    "optimizer_in_backward": Annotated[
        Switch,
        option(
            "Update each parameter in backward, and free its gradient at once.", "--optimizer-in-backward"
        ),
    ],
    "offload_optimizer": Annotated[
        float | None,
        option(
            "Fraction of the optimizer state and of the gradients on the host; 1 is ZeRO-Offload. [default: "
            "0]"
        ),
    ],
    "offload_weights": Annotated[
        Switch,
        option(
            "Keep the weights that ZeRO 3 splits on the host, with their gradients and the optimizer state "
            "(CPUOffloadPolicy of FSDP2, offload_param of DeepSpeed).",
            "--offload-weights",
        ),
    ],
    "partition_activations": Annotated[
        Switch,
        option("Split kept layer inputs among the --tp ranks (P_a of ZeRO-R).", "--partition-activations"),
    ],
    "offload_activations": Annotated[
        Switch, option("Keep saved activations on the host.", "--offload-activations")
    ],
    "loss": Annotated[
        Losses | None,
        option(
            "How cross entropy is computed. PyTorch: torch (logits cast to float32), torch-uncast (no cast), "
            "compiled, upcast and float32 (the caller holds float32 logits, with or without the logits "
            "before the cast), transformers (nobody holds logits). In place: in-place (Megatron, lowtide), "
            "in-place-fused (Megatron's fused kernels), in-place-copy (Unsloth). In --loss-chunks pieces, "
            "with the output layer: chunked (of the tokens), chunked-forward (of the tokens, gradients made "
            "in forward: lowtide), chunked-vocabulary and vocabulary-eager (of the vocabulary). In pieces of "
            "its own: fused-linear (Liger). [default: torch with --tp 1, else in-place]"
        ),
    ],
    "loss_chunks": Annotated[int | None, option("Number of pieces of a chunked loss. [default: 8]")],
    "tiles": Annotated[
        int | None,
        option(
            "Number of pieces of the tokens. The MLP and a chunked loss process them one after another "
            "(ALST). [default: 1]"
        ),
    ],
    "fused_qkv": Annotated[
        Switch,
        option(
            "The saved v is a view of one product of q, k and v, and keeps all of it (LitGPT).",
            "--fused-qkv",
        ),
    ],
    "unfused_norms": Annotated[
        Switch,
        option("RMS norms run as separate float32 operations (transformers).", "--unfused-norms"),
    ],
    "unfused_mlp": Annotated[
        Switch,
        option(
            "The MLP's activation runs as separate operations: SwiGLU also keeps silu(gate), gelu_new keeps "
            "three more tensors.",
            "--unfused-mlp",
        ),
    ],
    "keep_output_tensors": Annotated[
        Switch,
        option(
            "A stage keeps its outputs after it has sent them (arXiv 2205.05198, App. B).",
            "--keep-output-tensors",
        ),
    ],
    "keep_gathered": Annotated[
        Switch,
        option(
            "With --sequence-parallel, layers keep the inputs that they have gathered (DTensor, nanotron).",
            "--keep-gathered",
        ),
    ],
    "gather_logits": Annotated[
        Switch,
        option(
            "Each tensor-parallel rank gathers the logits of the whole vocabulary for the loss (Hugging "
            "Face).",
            "--gather-logits",
        ),
    ],
    "no_sync": Annotated[
        Switch,
        option(
            "Gradients that ZeRO splits stay whole until the last microbatch of a step (FSDP's no_sync).",
            "--no-sync",
        ),
    ],
    "flat_parameters": Annotated[
        Switch,
        option(
            "Adapters and frozen weights of a layer share one flat parameter (FSDP 1, LitGPT).",
            "--flat-parameters",
        ),
    ],
    "embedding_unit": Annotated[
        Switch,
        option(
            "The embedding is a unit of fully_shard by itself, and freed after its lookup (torchtitan).",
            "--embedding-unit",
        ),
    ],
    "keep_weights": Annotated[
        Switch,
        option(
            "Weights that ZeRO 3 gathers in forward stay until their backward (DeepSpeed).", "--keep-weights"
        ),
    ],
    "ddp_buckets": Annotated[
        Switch,
        option(
            "Count the buckets of DistributedDataParallel in addition to the gradients; this is its default.",
            "--ddp-buckets",
        ),
    ],
    "compile": Annotated[
        Switch,
        option(
            "Pointwise operations are fused, by torch.compile or by hand. Changes times, and the bytes of "
            "--recompute selective-op.",
            "--compile",
        ),
    ],
    "float8": Annotated[
        Switch, option("The matrix products of layers run in float8. Changes times only.", "--float8")
    ],
    "scaling": Annotated[
        Literal["tensorwise", "rowwise", "mxfp8", "nvfp4"] | None,
        option("Scaling of the products of --float8, by torchao's names. [default: tensorwise]"),
    ],
    "overlap_tensor": Annotated[
        Switch,
        option(
            "Tensor-parallel collectives run while products run (tp_comm_overlap, asynchronous TP). Changes "
            "times only.",
            "--overlap-tensor",
        ),
    ],
    "reentrant": Annotated[
        Switch,
        option(
            "A recomputed layer runs to its end, and keeps its output (Megatron, DeepSpeed). Without this "
            "flag it stops when backward has all tensors that it needs.",
            "--reentrant",
        ),
    ],
    "iteration_time": Annotated[
        float | None, option("Measured seconds of a step, from which MFU and HFU follow.", "--iteration-time")
    ],
    "peak_tflops": Annotated[
        float | None,
        option("Peak TFLOP/s of one device, for MFU and HFU. [default: that of --device]", "--peak-tflops"),
    ],
    "device": Annotated[
        str | None,
        option(
            "a100, h100, h200, ...: use the memory and the peak rate of this device, and predict the time of "
            "a step."
        ),
    ],
    "memory": Annotated[
        str | None,
        option("Memory of a device: 80GiB, or 80GB (which is 74.5GiB). [default: that of --device]"),
    ],
}
"""The flags that commands share, by the names of their parameters; each is None where it is not given."""

AsPublished = Annotated[
    bool,
    typer.Option(
        "--as-published",
        help="Use the parallel sizes of the model's paper (22b, 175b, 530b, 1t) where no flag gives another.",
    ),
]
FromHf = Annotated[
    Path | None,
    option(
        "A Hugging Face config.json or its folder, of any architecture. If no formula fits, the model is "
        "traced on fake tensors (needs torch). The output says which was used.",
        "--from-hf",
    ),
]
ConfigFile = Annotated[
    Path | None,
    option("A JSON file whose keys are names of flags. A flag on the command line overrides it.", "--config"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Csv = Annotated[bool, typer.Option("--csv", help="Print all terms of all stages as CSV.")]
Plot = Annotated[
    Path | None, option("Draw the stages into this file (.png, .pdf or .svg; needs matplotlib).")
]
StageOption = Annotated[
    int, typer.Option("--stage", help="Pipeline stage whose terms are printed line by line.")
]
Brief = Annotated[bool, typer.Option("--brief", help="Leave out the table of all terms.")]


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


def memory_note(text: str | None, device: str | None = None) -> str:
    """What to say where a card's name stands for its memory: one sold with "80 GB", ``device`` at best.

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
        for card in sorted(DEVICES.values(), key=lambda card: card.name != device)
        if found < card.memory_bytes <= int(asked[1]) << 30
    ]
    return f"{text} is {format_bytes(found)} (GB are powers of 1000, GiB of 1024){''.join(meant[:1])}"


def _varied(flag: Any) -> Any:
    """A flag whose help says that it is varied where it is not given."""
    kind, told = get_args(flag)
    text = f"{told.help.partition(' [default')[0]} [default: varied]"
    return Annotated[kind, option(text, *(told.param_decls or ()), *filter(None, (told.default,)))]


def with_flags(
    *names: str, varied: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function: ``FLAGS`` of these names, of which the function gets those that were
    given as its first argument, and its own parameters, those without a default before the flags.
    """

    def command_of(run: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(run, include_extras=True)
        own = [
            one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[one.name])
            for one in list(signature(run).parameters.values())[1:]
        ]
        known = FLAGS | {name: _varied(FLAGS[name]) for name in varied}
        flags = [Parameter(n, Parameter.KEYWORD_ONLY, default=None, annotation=known[n]) for n in names]

        @wraps(run)
        def command(**values: Any) -> None:
            given = {name: values.pop(name) for name in names}
            run({name: value for name, value in given.items() if value is not None}, **values)

        needed = [one for one in own if one.default is Parameter.empty]
        rest = [one for one in own if one.default is not Parameter.empty]
        command.__signature__ = Signature([*needed, *flags, *rest])  # type: ignore[attr-defined]
        return command

    return command_of


@with_flags(*FLAGS)
def estimate_command(
    given: dict[str, Any],
    as_published: AsPublished = False,
    config: ConfigFile = None,
    from_hf: FromHf = None,
    json_out: Json = False,
    csv_out: Csv = False,
    plot: Plot = None,
    stage: StageOption = 0,
    brief: Brief = False,
) -> None:
    """Estimate bytes, FLOPs and traffic of a training step by closed formulas. No GPU, no torch."""
    memory = given.get("memory")
    if from_hf is not None:
        if "model" in given or config is not None:
            raise EstimateError("--from-hf names the model: leave --model and --config out")
        from lowtide.estimate.hugging_face import no_formula

        if why := no_formula(from_hf):
            return _traced(from_hf, why, given, json_out)
        given["model"] = str(from_hf)
    found = make(given, config, as_published)
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

        console = Console()
        render.show(found, console, stage, lines=not brief, name=given.get("model"))
        for note in (memory_note(memory, given.get("device")), _assumed(given, config, as_published, found)):
            if note:
                console.print(f"note: {note}", highlight=False)
        if from_hf is not None:
            typer.echo(f"found by formula: {from_hf} is of a type that has one")


def _traced(path: Path, why: str, given: dict[str, Any], json_out: bool) -> None:
    """The estimate of a model without a formula."""
    from lowtide.estimate.devices import device as find_device
    from lowtide.estimate.simulation.any_model import any_model

    device, memory = given.pop("device", None), given.pop("memory", None)
    room = parse_memory(memory) if memory else find_device(device).memory_bytes if device else None
    config, stage, parts = any_model(path, **given)
    held = int(stage.total_bytes * max(one.reserved for one in parts))
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


def make(given: dict[str, Any], config: Path | None, as_published: bool) -> Any:
    """The estimate that the flags ask for."""
    from lowtide.estimate import configure, estimate, read_config
    from lowtide.estimate.devices import device as find_device

    refuse_zero(given)
    given = dict(given)
    seconds, tflops = given.pop("iteration_time", None), given.pop("peak_tflops", None)
    device, memory = given.pop("device", None), given.pop("memory", None)
    known = find_device(device) if device is not None else None
    given["recompute"] = parse_recompute(given.get("recompute"))
    given["iteration_seconds"] = seconds
    given["peak_flops"] = tflops * 1e12 if tflops is not None else known.flops if known else None
    given["memory_bytes"] = (
        parse_memory(memory) if memory is not None else known.memory_bytes if known else None
    )
    if seconds is not None and given["peak_flops"] is None:
        raise EstimateError("--iteration-time without a peak rate: give --peak-tflops or --device too")
    if as_published:
        given["as_published"] = True
    if config is not None:
        return estimate(read_config(config, **given), known)
    return estimate(configure(given.pop("model", None), **given), known)


def _assumed(given: dict[str, Any], config: Path | None, as_published: bool, found: Any) -> str:
    """What changes bytes most, where nobody said it."""
    from lowtide.estimate.hugging_face import read_json

    asked, told = (read_json(config) if config else {}) | given, []
    if "seq" not in asked and not as_published:
        told.append(f"--seq {found.config.seq}, the longest that the model takes")
    if "dtype" not in asked:
        told.append(f"--dtype {found.config.dtype}, bfloat16 beside float32 copies of the weights")
    return f"not given, and assumed: {'; '.join(told)}" if told else ""
