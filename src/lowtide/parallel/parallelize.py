"""`parallelize`: a Hugging Face model, written for one process, shared by a group of ranks.

The model publishes which of its linear layers are column parallel and which row parallel
(``base_model_tp_plan`` and ``_tp_plan``); the rest follows. A module that holds column-parallel layers is a
*region*: its input is gathered in front of it, or, without sequence parallelism, its gradient is summed
behind it. A row-parallel layer ends the region. Under sequence parallelism the residual stream is cut in
front of the first layer and put together behind the last norm, and every parameter in between that is not
shared gets the sum of its gradients.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowtide import private
from lowtide.errors import expect
from lowtide.parallel.embedding import ParallelEmbedding
from lowtide.parallel.errors import ParallelError, ParallelWarning
from lowtide.parallel.given import check_dtypes
from lowtide.parallel.gradients import Marker
from lowtide.parallel.groups import TensorGroup, tensor_group
from lowtide.parallel.layers import RowParallelLinear
from lowtide.parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from lowtide.parallel.module import ParallelModule
from lowtide.parallel.random import ParallelDropout, RandomTracker
from lowtide.parallel.region import RegionColumnLinear, RegionHeadsLinear, enter_region

COLUMN = {"colwise": 1, "packed_colwise": 2, "colwise_gather_output": 1, "colwise_rep": 1}
ROW = {"rowwise": True, "rowwise_split_input": False, "rowwise_rep": False}
EMBEDDING = {"embedding_rowwise": False, "embedding_colwise": True}
REPLICATED = {"replicate": False, "replicated_with_grad_allreduce": True}
SEQUENCE = 1  # Hugging Face models are (batch, sequence, features)


def parallelize(
    model: nn.Module,
    mesh: Any = None,
    sequence_parallel: bool = False,
    *,
    plan: Mapping[str, str] | None = None,
    reduce_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Share a model's layers among the ranks of ``mesh``, in place. Every rank gives the same inputs and gets
    the same loss. Attention heads that the ranks do not divide are padded by heads of zeros, which are never
    trained; a warning says so.

    Args:
        model: a Hugging Face model with the same weights on every rank.
        mesh: as `lowtide.parallel.tensor_group` takes it.
        sequence_parallel: between the regions each rank holds its shard of the sequence, which must divide.
            Call `allreduce_sequence_parallel_gradients` after backward.
        plan: from module names, with ``*`` for any part of one, to ``colwise``, ``colwise_gather_output``,
            ``packed_colwise`` (two blocks one above the other), ``rowwise``, ``rowwise_split_input``,
            ``embedding_rowwise``, ``embedding_colwise``, ``replicate`` or ``replicated_with_grad_allreduce``.
            ``None`` takes the plan that the model publishes.
        reduce_dtype: sum over ranks in this dtype if it is wider.

    Returns:
        The model. With one rank it is left as it is.

    Raises:
        ParallelError: there is no plan or it names no module; a style is not known; features do not divide;
            the ranks' weights differ.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...     num_attention_heads=4, vocab_size=64)
        >>> model = parallelize(LlamaForCausalLM(LlamaConfig(**shape)), sequence_parallel=True)

    Source: the plans are those of Hugging Face transformers (``base_model_tp_plan``).
    """
    expect(isinstance(model, nn.Module), "parallelize(model=)", model, "a torch.nn.Module", ParallelError)
    named = plan is None or isinstance(plan, Mapping)
    allowed = "styles by module names, as in {'layers.*.up': 'colwise'}, or None"
    expect(named, "parallelize(plan=)", plan, allowed, ParallelError)
    check_dtypes("parallelize", reduce_dtype=reduce_dtype)
    group = tensor_group(mesh)
    styles = _styles(model, published_plan(model) if plan is None else plan, strict=plan is not None)
    if any(isinstance(module, ParallelModule) for module in model.modules()):
        raise ParallelError("this model is shared already: parallelize works on a model for one process")
    if group.size == 1:
        return model
    _check_same(model, group)
    job = _Job(model, group, sequence_parallel, reduce_dtype, styles)
    job.run()
    if job.padded:
        warnings.warn(
            f"{' and '.join(sorted(job.padded))}: the padding takes memory and time on {group.size} ranks. "
            "Use a number of ranks that divides the heads",
            ParallelWarning,
            stacklevel=2,
        )
    return model


def published_plan(model: nn.Module) -> dict[str, str]:
    """The tensor-parallel plan that a Hugging Face model publishes, by patterns of module names in this
    model.

    Raises:
        ParallelError: it publishes none.
    """
    config: Any = getattr(model, "config", None)
    found: dict[str, str] = {}
    prefix = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items():
        found[inner + name] = style
    names = [name for name, _ in model.named_modules()]
    for name, style in (getattr(model, "_tp_plan", None) or {}).items():
        if any(_matches(name, known) for known in names):
            found.setdefault(name, style)
    if not found:
        raise ParallelError(
            f"{type(model).__name__} publishes no tensor-parallel plan (config.base_model_tp_plan): pass "
            f"plan=, for example {{'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}}"
        )
    return found


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), name) is not None


def _styles(model: nn.Module, plan: Mapping[str, str], strict: bool) -> dict[str, str]:
    """The style of every module that the plan names."""
    known = [*COLUMN, *ROW, *EMBEDDING, *REPLICATED]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in known:
            raise ParallelError(
                f"the plan gives {pattern!r} the style {style!r}, which is not supported: the styles are "
                f"{', '.join(known)}"
            )
        matching = [name for name, _ in model.named_modules() if _matches(pattern, name)]
        if strict and not matching:
            raise ParallelError(f"the plan names {pattern!r}, and no module is called that")
        found.update(dict.fromkeys(matching, style))
    return found


def _check_same(model: nn.Module, group: TensorGroup) -> None:
    """Raise unless every rank holds the same weights."""
    sums = torch.stack([p.detach().double().sum().cpu() for p in model.parameters()])
    weighted = torch.stack(
        [p.detach().double().flatten()[::7].square().sum().cpu() for p in model.parameters()]
    )
    mine = torch.cat([sums, weighted]).to(next(model.parameters()).device)
    every = [torch.empty_like(mine) for _ in range(group.size)]
    dist.all_gather(every, mine, group=group.process_group)
    for rank, theirs in enumerate(every):
        if not torch.equal(mine, theirs):
            raise ParallelError(
                f"rank {rank} and rank {group.rank} hold different weights: seed every rank alike before "
                "building the model, or load the same checkpoint on all"
            )


class _Job:
    """One call of `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        group: TensorGroup,
        sequence_parallel: bool,
        reduce_dtype: torch.dtype,
        styles: dict[str, str],
    ) -> None:
        self.model = model
        self.group = group
        self.sequence_parallel = sequence_parallel
        self.styles = styles
        self.options: dict[str, Any] = {
            "tensor_model_parallel_group": group,
            "reduce_dtype": reduce_dtype,
            "device": "meta",
        }
        self.reduce_dtype = reduce_dtype
        self.stack = self._stack()
        self.padded: set[str] = set()
        # a parameter that was cut, by the id of the whole one: tied weights stay tied
        self.shared: dict[int, nn.Parameter] = {}

    def _stack(self) -> str:
        """Name of the list of layers."""
        lists = {
            name
            for name, module in self.model.named_modules()
            if isinstance(module, nn.ModuleList)
            and any(styled.startswith(f"{name}.") for styled in self.styles)
        }
        outer = [
            name
            for name in lists
            if not any(name.startswith(f"{other}.") for other in lists if other != name)
        ]
        if len(outer) != 1 and self.sequence_parallel:
            raise ParallelError(
                "sequence_parallel=True needs one list of layers to cut the sequence in front of, and the "
                f"plan reaches into {len(outer)} ({', '.join(sorted(outer)) or 'none'}): pass "
                "sequence_parallel=False, or a plan for one"
            )
        return outer[0] if len(outer) == 1 else ""

    def run(self) -> None:
        """Replace the layers, enter the regions, cut and join the sequence."""
        self._tie_embeddings()
        for name, style in self.styles.items():
            module = self.model.get_submodule(name)
            if style in COLUMN:
                self._put(name, self._column(name, _linear(name, module), style))
            elif style in ROW:
                self._put(name, self._row(name, _linear(name, module), style))
            elif style in EMBEDDING:
                self._put(name, self._embedding(name, module, style))
            elif REPLICATED[style]:
                self._mark(module)
        regions = {
            name.rpartition(".")[0]
            for name, style in self.styles.items()
            if style in COLUMN and self._inside(name)
        }
        for name in regions:
            self._region(name)
        for name, style in self.styles.items():
            if style in COLUMN and not self._inside(name):
                self._region(name)
        if self.sequence_parallel:
            self._cut_sequence(regions)

    def _inside(self, name: str) -> bool:
        return bool(self.stack) and name.startswith(f"{self.stack}.")

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)

    # ---- layers ----------------------------------------------------------------------------------

    def _column(self, name: str, linear: nn.Linear, style: str) -> nn.Module:
        gather, stride = style in ("colwise_gather_output", "colwise_rep"), COLUMN[style]
        own: dict[str, Any] = {**self.options, "dtype": linear.weight.dtype}
        bias = linear.bias is not None
        width, heads, together = self._heads(name, linear.out_features)
        if heads % self.group.size and not together:
            layer: Any = RegionHeadsLinear(linear.in_features, heads, width, bias, **own)
            self._share_heads(name, heads)
        else:
            layer = RegionColumnLinear(
                linear.in_features, linear.out_features, bias, gather, stride=stride,
                pad=together > 0 or (gather and not heads),
                pad_alignment_size_per_rank=max(together * width, 1), **own
            )  # fmt: skip
        return self._load(layer, linear)

    def _heads(self, name: str, features: int) -> tuple[int, int, int]:
        """The heads that a layer makes or takes: their width, their number, and how many of them belong to
        one head of keys and values, where the ranks do not divide those; zeros where the features are no
        heads.
        """
        parent: Any = self.model.get_submodule(name.rpartition(".")[0])
        config: Any = getattr(parent, "config", None)
        width = getattr(parent, "head_dim", None) or getattr(parent, "head_size", None)
        queries = getattr(config, "num_attention_heads", None)
        if not width or not queries or features % width:
            return 0, 0, 0
        shared, size = getattr(config, "num_key_value_heads", None) or queries, self.group.size
        each = {queries: queries // shared, shared: 1}
        each.setdefault(3 * queries, 3)  # q, k and v of each head side by side
        found = features // width
        if found not in each:
            return 0, 0, 0
        if queries % size == 0 and (shared % size == 0 or size % shared == 0):
            return int(width), found, 0
        heads = -(-shared // size) * size * (queries // shared)
        self.padded.add(f"{queries} attention heads are padded to {heads}")
        return int(width), found, each[found]

    def _share_heads(self, name: str, heads: int) -> None:
        """Several ranks use the same key-value head: the attention repeats it for this rank's query heads
        only.
        """
        parent: Any = self.model.get_submodule(name.rpartition(".")[0])
        queries = parent.config.num_attention_heads
        if not hasattr(parent, "num_key_value_groups"):
            raise ParallelError(
                f"{name}: {heads} key-value heads on {self.group.size} ranks, and the module does not say "
                "how it repeats them"
            )
        parent.num_key_value_groups = queries // self.group.size

    def _row(self, name: str, linear: nn.Linear, style: str) -> nn.Module:
        parallel = ROW[style] or None
        sequence = self.sequence_parallel and self._inside(name)
        if sequence and not parallel:
            raise ParallelError(
                f"{name}: the style {style!r} takes a whole input, which sequence_parallel=True does not "
                "have there"
            )
        width, _, together = self._heads(name, linear.in_features)
        layer = RowParallelLinear(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            bool(parallel),
            sequence_parallel_enabled=sequence,
            sequence_dimension=SEQUENCE if sequence else None,
            dtype=linear.weight.dtype,
            pad=together > 0,
            pad_alignment_size_per_rank=max(together * width, 1),
            **self.options,
        )
        return self._load(layer, linear)

    def _embedding(self, name: str, module: nn.Module, style: str) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise ParallelError(
                f"{name}: the style {style!r} is for an nn.Embedding, not for {type(module).__name__}"
            )
        layer = ParallelEmbedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, module.max_norm,
            module.norm_type, module.scale_grad_by_freq,
            module.sparse, device="meta", dtype=module.weight.dtype, shard_across_embedding=EMBEDDING[style],
            pad=True,
            tensor_model_parallel_group=self.group,
        )  # fmt: skip
        return self._load(layer, module)

    def _load(self, layer: ParallelModule, source: nn.Module) -> ParallelModule:
        """Give the layer its part of the source's parameters."""
        for key, where in layer.partitions.items():
            whole: Any = getattr(source, key)
            part = self.shared.get(id(whole))
            if part is None:
                part = nn.Parameter(where.take(whole.detach()).clone(), requires_grad=whole.requires_grad)
                self.shared[id(whole)] = part
            setattr(layer, key, part)
        layer.train(source.training)
        for hook in private.forward_pre_hooks(layer):
            if isinstance(hook, Marker):
                hook.mark(layer)  # the parameters were placeholders so far
        return layer

    def _tie_embeddings(self) -> None:
        """An output layer that is cut along the vocabulary, and shares its weight with the embedding, takes
        the embedding with it.
        """
        embeddings = {
            id(m.weight): name for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)
        }
        for name, style in list(self.styles.items()):
            module = self.model.get_submodule(name)
            if style in COLUMN and isinstance(module, nn.Linear) and id(module.weight) in embeddings:
                self.styles.setdefault(embeddings[id(module.weight)], "embedding_rowwise")

    def _mark(self, module: nn.Module) -> None:
        for part in module.modules():
            self._mark_own(part)

    def _mark_own(self, module: nn.Module) -> None:
        names = [name for name, _ in module.named_parameters(recurse=False)]
        if names:
            Marker(module, names, self.group)

    # ---- regions ---------------------------------------------------------------------------------

    def _region(self, name: str) -> None:
        module = self.model.get_submodule(name)
        dimension = SEQUENCE if self.sequence_parallel and self._inside(name) else None
        for layer in module.children():
            if isinstance(layer, RegionColumnLinear | RegionHeadsLinear):
                layer.region_dimension = dimension
        module.forward = Region(module, self.group, dimension, self.reduce_dtype)  # type: ignore

    def _cut_sequence(self, regions: Iterable[str]) -> None:
        """Cut in front of the first layer, join behind the last norm, and mark what works on a piece."""
        layers: Any = self.model.get_submodule(self.stack)
        inside = tuple(f"{name}." for name in regions)
        layers[0].register_forward_pre_hook(_Cut(self.group), with_kwargs=True)
        last = self._behind_layers()
        (layers[-1] if last is None else self.model.get_submodule(last)).register_forward_hook(
            _Join(self.group)
        )
        own = [(f"{self.stack}.{name}", module) for name, module in layers.named_modules() if name]
        if last is not None:
            own += [(last, self.model.get_submodule(last))]
        for name, module in own:
            if isinstance(module, ParallelModule) or f"{name}.".startswith(inside):
                continue
            if isinstance(module, nn.Dropout) and module.p:
                self._put(
                    name, ParallelDropout(module.p, sharded=True, group=self.group).train(module.training)
                )
            self._mark_own(module)

    def _behind_layers(self) -> str | None:
        """The one module that the model runs behind its layers, if it says so: the last norm."""
        base, _, own = self.stack.rpartition(".")
        order = list(getattr(getattr(self.model, "config", None), "base_model_pp_plan", None) or {})
        if own in order and len(order) == order.index(own) + 2:
            return f"{base}.{order[-1]}" if base else order[-1]
        return None


class Region:
    """A module's forward with its input gathered, and with random numbers that are this rank's own.

    It is the instance's ``forward`` attribute, so hooks, wrappers and ``state_dict`` see the module that they
    know.
    """

    def __init__(
        self, module: nn.Module, group: TensorGroup, dimension: int | None, reduce_dtype: torch.dtype
    ) -> None:
        self.module = module
        self.group = group
        self.dimension = dimension
        self.reduce_dtype = reduce_dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs, x = _with_first(
            args, kwargs, lambda x: enter_region(x, self.group, self.dimension, self.reduce_dtype)
        )
        random = (
            RandomTracker(self.group, x.device).per_rank()
            if self.module.training and self._drops()
            else nullcontext()
        )
        with random:
            return type(self.module).forward(self.module, *args, **kwargs)

    def _drops(self) -> bool:
        inside = any(isinstance(module, nn.Dropout) and module.p for module in self.module.modules())
        return inside or bool(getattr(self.module, "attention_dropout", 0.0))


class _Cut:
    """A hook that cuts the hidden states that a layer is called with."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        args, kwargs, _ = _with_first(
            args, kwargs, lambda x: scatter_to_sequence_parallel_region(x, SEQUENCE, self.group)
        )
        return args, kwargs


class _Join:
    """A hook that puts the whole sequence together; what follows is the same on every rank."""

    def __init__(self, group: TensorGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        first, *rest = output if isinstance(output, tuple) else (output,)
        whole = gather_from_sequence_parallel_region(
            first, SEQUENCE, to_model_parallel=False, process_group=self.group
        ).contiguous()
        return (whole, *rest) if isinstance(output, tuple) else whole


def _with_first(args: Any, kwargs: Any, change: Any) -> tuple[Any, Any, Tensor]:
    """The arguments with the hidden states changed: the first positional one, or ``hidden_states``."""
    if args:
        x = change(args[0])
        return (x, *args[1:]), kwargs, x
    if "hidden_states" not in kwargs:
        raise ParallelError(
            f"a shared module was called with {', '.join(kwargs) or 'nothing'}: its first argument must be "
            "the hidden states"
        )
    x = change(kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": x}, x


def _linear(name: str, module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise ParallelError(f"{name}: this style is for an nn.Linear, not for {type(module).__name__}")
    return module
