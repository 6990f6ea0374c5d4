"""What a training run is asked to do, as data: `lowtide.train.options` checks it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from lowtide.meter import available
from lowtide.models import ModelSpec, model_spec
from lowtide.progress import working
from lowtide.train.errors import require
from lowtide.train.tokenizer import BYTES


@dataclass(frozen=True)
class Settings:
    """A training run.

    Attributes:
        model: a preset, ``hf:TYPE[:key=value,...]``, the path of a Hugging Face ``config.json`` or of the
            folder that holds one, or a model's name on the hub.
        pretrained: begin with the weights in that folder (or on the hub) instead of random ones.
        budget: the most live bytes at any moment: ``600MiB``, ``60%`` of the plain step's peak, ``min`` (the
            smallest that works) or ``auto`` (what the device has, less a reserve); ``None`` with a policy
            that takes none.
        raise_budget: take the smallest budget that works where ``budget`` is below it.
        policy: how to meet the budget; ``None`` is ``auto``.
        host_budget: the most that the policy moves to main memory; ``None`` for a quarter of what is free.
        tiles: ``auto`` runs modules in pieces of the tokens where no plan fits otherwise.
        plan_seconds: about how long a search for a plan may take; ``None`` for what is usual.
        steps: optimizer steps.
        batch, seq: sequences in a micro-batch, tokens in a sequence.
        dtype: ``fp32``, or ``bf16`` for autocast over float32 weights.
        seed: of the weights, the batches and dropout.
        data, text_column: as `lowtide.train.text.read_text` takes them; ``None`` is Python's standard
            library.
        tokenizer: as `lowtide.train.tokenizer.find_tokenizer` takes it; ``None`` is the model's own, else
            bytes.
        lr, warmup: peak learning rate, and the steps up to it.
        lr_schedule: from there on, one of `lowtide.train.schedule.SHAPES`.
        weight_decay: AdamW's, on matrices only.
        optimizer_host_fraction: share of AdamW's state on the host (0 to 1, or ``auto``): main memory for
            CUDA, disk for the CPU; ``None`` leaves the plain optimizer on the device.
        grad_accum: micro-batches per optimizer step.
        clip: largest gradient norm; 0 is no clipping.
        eval_every: steps between evaluations on the validation text; 0 evaluates at the end only.
        eval_batches: micro-batches per evaluation.
        device: ``cpu``, ``cuda`` or ``cuda:N``.
        dropout, unfused_attention, loss_chunks: changes to a built-in model's preset; ``None`` leaves the
            preset's.
        checkpoint_dir, checkpoint_every: where and how often to write checkpoints; the last step is always
            written. Plans are kept there, too (`kept_plans`).
        resume: go on from the newest checkpoint.
        stop_after: stop at this step as if interrupted; the learning rate still follows ``steps``.
        compare: measure a plain and a planned step side by side at the end; ``None`` does so where it can be
            done (where one plan rules the step: without a pipeline).
        tp, cp, dp, pp: processes that share every layer, every sequence, the batch, and the stages of the
            model.
        cp_exchange: what the ``cp`` processes exchange, as `lowtide.parallel.context_parallel` takes it.
        sequence_parallel: the ``tp`` processes share the sequence, too.
        shard_parameters: the ``dp`` processes, and those of ``cp``, share parameters, gradients and optimizer
            state, too (FSDP2).
        dp_replicate: copies of these shards: groups of ``dp / dp_replicate`` processes share each one (HSDP).
        schedule: of the pipeline's micro-batches, one of `lowtide.parallel.pipeline.SCHEDULES`.
        compile: compile the step within the budget (`lowtide.compile`).
        compile_backend: ``inductor`` or ``aot_eager``; ``None`` is ``inductor``.
        tensorboard: folder for TensorBoard's curves.
        json: file for the results.
        report: file for the report of one step: a page, or what else its ending says
            (`lowtide.report.save_report`).
    """

    model: str = "gpt-mini"
    pretrained: bool = False
    budget: str | None = "60%"
    raise_budget: bool = False
    policy: str | None = None
    host_budget: str | None = None
    tiles: Literal["auto"] | None = None
    plan_seconds: float | None = None
    steps: int = 100
    batch: int = 8
    seq: int = 256
    dtype: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    data: str | Path | None = None
    text_column: str | None = None
    tokenizer: str | None = None
    lr: float = 1e-3
    warmup: int = 20
    lr_schedule: str = "cosine"
    weight_decay: float = 0.1
    optimizer_host_fraction: float | Literal["auto"] | None = None
    grad_accum: int = 1
    clip: float = 1.0
    eval_every: int = 50
    eval_batches: int = 8
    device: str = "cpu"
    dropout: float | None = None
    unfused_attention: bool = False
    loss_chunks: int | None = None
    checkpoint_dir: Path | None = None
    checkpoint_every: int = 0
    resume: bool = False
    stop_after: int | None = None
    compare: bool | None = None
    tp: int = 1
    cp: int = 1
    cp_exchange: str = "auto"
    dp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    shard_parameters: bool = False
    dp_replicate: int = 1
    schedule: str | None = None
    compile: bool = False
    compile_backend: str | None = None
    tensorboard: Path | None = None
    json: Path | None = None
    report: Path | None = None

    @property
    def ranks(self) -> int:
        """How many processes the run needs."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def layout(self) -> str:
        """How the processes are arranged, as the flags that say so."""
        flags = [
            f"--{name} {count}"
            for name, count in (
                ("tp", self.tp),
                ("cp", self.cp),
                ("dp", self.dp),
                ("dp-replicate", self.dp_replicate),
                ("pp", self.pp),
            )
            if count > 1
        ]
        flags += ["--sequence-parallel"] * self.sequence_parallel + [
            "--shard-parameters"
        ] * self.shard_parameters
        return " ".join(flags) or "--tp 1 --dp 1 --pp 1"

    @property
    def kept_plans(self) -> Path | None:
        """The folder in which plans are kept, for a run that goes on: beside its checkpoints."""
        return None if self.checkpoint_dir is None else self.checkpoint_dir / "plans"

    @property
    def compares(self) -> bool:
        """Whether the run ends with a comparison, by default where there is a meter for it."""
        if self.compare is not None:
            return self.compare
        return self.pp == 1 and (self.device != "cpu" or available())

    def spec(self, vocabulary: int = BYTES) -> ModelSpec:
        """The model for texts of so many different tokens, with the changes that the options ask for, checked
        against sequence and text.
        """
        spec = checked_spec(
            self.model, self.seq, self.dropout, self.unfused_attention, self.loss_chunks, vocabulary
        )
        require(
            not self.pretrained or spec.source is not None,
            "pretrained",
            "",
            f"{self.model} is a shape and has no weights: give --model a folder with safetensors, or a name "
            "on the hub",
        )
        return replace(spec, pretrained=True) if self.pretrained else spec

    def trajectory(self, corpus_digest: str, vocabulary: int = BYTES) -> dict[str, Any]:
        """Everything that the losses depend on. Budget, policy and what is reported may differ between a run
        and its resumption.
        """
        names = (
            "steps",
            "batch",
            "seq",
            "dtype",
            "seed",
            "lr",
            "warmup",
            "lr_schedule",
            "weight_decay",
            "grad_accum",
            "clip",
            "device",
        )
        return {
            **{name: getattr(self, name) for name in names},
            "data": corpus_digest,
            "model": self.spec(vocabulary).describe(),
        }

    def to_json(self) -> dict[str, Any]:
        """These options as plain values."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}


def checked_spec(
    model: str,
    seq: int,
    dropout: float | None,
    unfused_attention: bool,
    loss_chunks: int | None,
    vocabulary: int = BYTES,
) -> ModelSpec:
    """A model for texts of ``vocabulary`` different tokens in sequences of ``seq`` of them. A built-in one
    gets a vocabulary that is large enough.

    Raises:
        OptionError: the model cannot read such tokens or sequences that long.
    """
    changes = {
        "dropout": dropout,
        "loss_chunks": loss_chunks,
        "fused_attention": False if unfused_attention else None,
    }
    with working("planning", "planned"):  # tells what takes seconds
        spec = model_spec(model, {key: value for key, value in changes.items() if value is not None})
    if spec.positions is not None:
        require(
            seq <= spec.positions, "seq", seq, f"{model} has {spec.positions} positions, choose at most that"
        )
    if spec.config is not None and spec.vocabulary < vocabulary:
        config = replace(spec.config, vocabulary=vocabulary)
        return replace(spec, config=config, vocabulary=vocabulary)
    what = "bytes" if vocabulary == BYTES else "the tokenizer"
    require(
        spec.vocabulary >= vocabulary,
        "model",
        model,
        f"its vocabulary of {spec.vocabulary} is too small for {what}, which need{'s' * (what != 'bytes')} "
        f"{vocabulary}",
    )
    return spec
