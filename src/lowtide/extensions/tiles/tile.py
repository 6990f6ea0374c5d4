"""`tile`: a module that treats each token alone runs on one piece of the tokens after another, forward and
backward.

In: a module and a number of pieces. Out: a `Tiling`; the module's forward is a `TiledForward` until it is
removed. Autograd keeps what enters the module. Backward runs the forward of a piece again, and that piece's
backward right behind it, so what is made inside is there for one piece at a time.

What enters is saved by a node of its own (`_Enter`) before the forward runs (`_Run`). A checkpoint around the
module that recomputes a block has then all that it needs when it reaches the module, and does not run the
forward a third time.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lowtide import private
from lowtide.errors import PlanError, expect, is_count, shorten
from lowtide.extensions.tiles.stand_in import Logits
from lowtide.interception import suspended
from lowtide.run.messages import warn

_SAMPLE_TOKENS = 256
"""Tokens on which the first call checks the module, and the first backward its weights' gradients."""


class Tiling:
    """Modules that run in pieces: what `tile` returns.

    Args:
        modules: the modules.
        pieces: of each call.
        dimension: of the first tensor, along which tokens lie.

    Attributes:
        modules: as given.
        chosen: a limit has chosen them (`lowtide.extensions.tiles.chosen`).
        refused: a call was refused, since a module is no function of single tokens.
        difference: how far a weight's gradient, as the sum over pieces, was from that of one product: the
            largest difference as a share of the gradient's largest element, in the first backward of each
            module; ``None`` before, and where the modules draw random numbers.
    """

    def __init__(self, modules: Sequence[nn.Module], pieces: int, dimension: int) -> None:
        self.modules, self.dimension = tuple(modules), dimension
        self.pieces = pieces
        self.chosen = self.refused = False
        self.difference: float | None = None
        self._told: set[str] = set()
        for module in self.modules:
            TiledForward(module, self).install()

    @property
    def pieces(self) -> int:
        """In how many pieces a call runs: at most as many as there are tokens. 1 runs the module as it is."""
        return self._pieces

    @pieces.setter
    def pieces(self, pieces: int) -> None:
        expect(is_count(pieces, 1), "tile(pieces=)", pieces, "a whole number of at least 1")
        self._pieces = int(pieces)

    def remove(self) -> None:
        """Give the modules their own forwards back."""
        for module in self.modules:
            tiled = tiled_forward(module)
            if tiled is not None and tiled.tiling is self:
                tiled.uninstall()

    def saw(self, difference: float | None) -> None:
        """A module's first backward has measured by how much its weights' gradients differ; ``None`` where it
        draws random numbers, which pieces draw in another order.
        """
        how = "by how much is not measured, because the modules draw random numbers"
        if difference is not None:
            self.difference = max(difference, self.difference or 0.0)
            how = f"in the first step they differ by up to {difference:.1g} of the largest gradient"
        self.say(
            "order",
            f"tiles add the gradients of weights up over {self.pieces} pieces, in another order than the "
            f"plain step: {how}",
        )

    def say(self, what: str, text: str) -> None:
        """Warn of one thing once."""
        if what not in self._told:
            self._told.add(what)
            warn(text)

    def __repr__(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in self.modules))
        return f"Tiling({len(self.modules)} x {kinds}, pieces={self.pieces})"


def tile(module: nn.Module | Iterable[nn.Module], pieces: int = 8, *, dim: int = -2) -> Tiling:
    """Run a module that treats each token alone, an MLP or a norm, on one piece of the tokens after another.

    Of the forward only the inputs are kept. In backward each piece runs its forward again, and then its
    backward. The module runs forward twice in all, inside a recomputed block, too. Gradients of weights are
    sums over the pieces; a warning says once how far they are from those of one product. Random numbers,
    autocast and gradients of several inputs are as without tiles. Without gradients the pieces run as well.

    The first call is checked: a module whose output for one token depends on others (attention, a batch norm,
    a router with capacity) is refused, and one that writes to its buffers, reads weights that are not its
    own, or lets a tensor out that has a gradient and that it does not return (an attribute, a forward hook).

    Args:
        module: the module, or several. Its forward is replaced on the instance until ``remove()``.
        pieces: in how many pieces.
        dim: the dimension of the first tensor argument along which tokens lie. Every tensor argument of the
            same size there is split alike; others are given whole. Every output that has the piece's size
            there is put together; a scalar is added up if it is a sum over tokens.

    Returns:
        The `Tiling`: its ``pieces`` may be changed between steps, ``difference`` is what was measured, and
        ``remove()`` takes the tiles off.

    Raises:
        PlanError: an argument is no module, or no number of pieces; in the first call, the module is no
            function of single tokens.

    Source: TiledMLP of arXiv 2506.13996 (section 3.1); the token-wise sequences of arXiv 2310.03294.

    Example:
        >>> import torch, lowtide
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> tiles = lowtide.tile(mlp, pieces=4)
        >>> x = torch.randn(2, 64, 8, requires_grad=True)
        >>> peak = lowtide.measure(lambda: mlp(x).sum().backward()).peak_bytes
        >>> tiles.remove()
        >>> peak < lowtide.measure(lambda: mlp(x).sum().backward()).peak_bytes
        True
    """
    given = "a torch.nn.Module, or several"
    several = isinstance(module, Iterable) and not isinstance(module, str)
    expect(several or isinstance(module, nn.Module), "tile(module=)", module, given)
    modules = (module,) if isinstance(module, nn.Module) else tuple(module)
    for one in modules:
        expect(isinstance(one, nn.Module), "tile(module=)", one, given)
        if (before := tiled_forward(one)) is not None:
            before.uninstall()
    expect(bool(modules), "tile(module=)", module, "at least one torch.nn.Module")
    expect(isinstance(dim, int), "tile(dim=)", dim, "a whole number")
    return Tiling(modules, pieces, dim)


def tiled_forward(module: nn.Module) -> TiledForward | None:
    """What runs a module in pieces, where one does."""
    found = module.__dict__.get("forward")
    return found if isinstance(found, TiledForward) else None


class _Split(NamedTuple):
    """How the tensors of a call are divided.

    Attributes:
        dimension: along which they are, not negative.
        tokens: their size there.
        pieces: as slices of it.
        tokenwise: for each tensor, whether it is divided.
    """

    dimension: int
    tokens: int
    pieces: tuple[slice, ...]
    tokenwise: tuple[bool, ...]

    def cut(self, tensor: Tensor, piece: slice) -> Tensor:
        """The part of a tensor that belongs to a piece."""
        return tensor.narrow(self.dimension, piece.start, piece.stop - piece.start)


class TiledForward:
    """In place of a module's forward: runs it piece by piece.

    Args:
        module: the module.
        tiling: says in how many pieces.

    Attributes:
        module, tiling: as given.
        original: a forward that the instance had of its own, or ``None``.
        checked: the modes (training or not) in which its first call was checked.
        compared: the gradients of its weights were compared.
    """

    __name__ = "forward"

    def __init__(self, module: nn.Module, tiling: Tiling) -> None:
        self.module, self.tiling = module, tiling
        self.original: Callable[..., Any] | None = module.__dict__.get("forward")
        self.checked: set[bool] = set()
        self.compared = False

    def install(self) -> None:
        """Take the place of the module's forward."""
        self.module.__dict__["forward"] = self

    def uninstall(self) -> None:
        """Give the module its own forward back."""
        if self.original is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.original

    @property
    def forward(self) -> Callable[..., Any]:
        """The module's own forward."""
        return self.original or type(self.module).forward.__get__(self.module)

    @property
    def name(self) -> str:
        """The module in a message."""
        return f"lowtide.tile({type(self.module).__name__})"

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained now."""
        return [one for one in self.module.parameters() if one.requires_grad]

    @private.skipped_by_dynamo
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the module's forward."""
        leaves, structure = private.tree_flatten((args, kwargs))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        tensors = [leaves[place] for place in places]
        for place in places:
            leaves[place] = None  # backward asks for the rest, and is not to hold the tensors by it
        split = self._split(tensors)
        if len(split.pieces) < 2:
            self._note_whole(tensors[0], split)
            return self.forward(*args, **kwargs)

        def rebuilt(parts: Sequence[Tensor]) -> Any:
            own = list(leaves)
            for place, part in zip(places, parts, strict=True):
                own[place] = part
            given, named = private.tree_unflatten(own, structure)
            return self.forward(*given, **named)

        needed = tuple(tensor.requires_grad for tensor in tensors)
        call = _Call(self, split, needed, rebuilt, _Modes(tensors[0].device, self.module.training))
        if self.module.training in self.checked:
            return call.run(tensors)
        self._check_units()
        call.is_checked = private.is_fake_mode_active()
        try:
            if call.is_checked:
                return call.run(tensors)
            with _unseen():
                _check(call, tensors)
        except PlanError as error:
            self.tiling.refused = True
            shorten(error)
            raise
        self.checked.add(self.module.training)
        return call.run(tensors)

    def _split(self, tensors: Sequence[Tensor]) -> _Split:
        if not tensors:
            raise PlanError(
                f"{self.name}: this call has no tensor among its arguments, so there are no tokens"
            )
        first, dimension = tensors[0], self.tiling.dimension
        if not -first.ndim <= dimension < first.ndim:
            raise PlanError(
                f"{self.name}: the first tensor has the shape {tuple(first.shape)}, and tokens lie along "
                f"dim={dimension}: give tile(dim=) the dimension of the tokens"
            )
        dimension %= first.ndim
        tokens = first.shape[dimension]
        lead = first.shape[:dimension]

        def is_tokenwise(tensor: Tensor) -> bool:
            if tensor.ndim <= dimension or tensor.shape[dimension] != tokens:
                return False
            own = tensor.shape[:dimension]
            return all(size in (1, whole) for size, whole in zip(own, lead, strict=True))

        length = max(1, math.ceil(tokens / self.tiling.pieces))
        pieces = tuple(slice(at, min(at + length, tokens)) for at in range(0, tokens, length))
        return _Split(dimension, tokens, pieces, tuple(map(is_tokenwise, tensors)))

    def _note_whole(self, first: Tensor, split: _Split) -> None:
        """Say that tiles do nothing where tokens probably lie along another dimension."""
        if split.tokens == 1 and self.tiling.pieces > 1 and first.numel() > 1 and torch.is_grad_enabled():
            self.tiling.say(
                "whole",
                f"{self.name} has no effect on this call: its first tensor has the shape "
                f"{tuple(first.shape)}, one token along dim={self.tiling.dimension}. Give tile(dim=) the "
                "dimension of the tokens",
            )

    def _check_units(self) -> None:
        """Refuse a module with FSDP units inside it, whose weights are gathered by calls of these."""
        units = [name for name, one in self.module.named_modules() if name and private.is_unit(one)]
        if units:
            raise PlanError(
                f"{self.name}: its part {units[0]!r} is a unit of fully_shard, whose weights are not there "
                "between the pieces. Call fully_shard on the tiled module itself, or on a module around it"
            )


class _Modes:
    """The settings that a call runs under: its autocast, and the random numbers from here on.

    Args:
        device: of the call.
        draws: it may draw random numbers.
    """

    def __init__(self, device: torch.device, draws: bool) -> None:
        kinds = {device.type, "cpu"}
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds
        }
        self._cache = torch.is_autocast_cache_enabled()
        self._generators: list[Any] = []
        if draws and not private.is_fake_mode_active():
            self._generators = [torch]
            if device.type not in ("cpu", "meta"):
                self._generators.append(torch.get_device_module(device))
        self._states = self.random_states()

    def random_states(self) -> list[bytes]:
        """Bytes, which are no tensors of the step."""
        return [one.get_rng_state().numpy().tobytes() for one in self._generators]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run under the same once more; the random numbers of what follows stay as they are."""
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self._cache))
            now = self.random_states()
            self._set(self._states)
            stack.callback(self._set, now)
            yield

    def _set(self, states: list[bytes]) -> None:
        for one, state in zip(self._generators, states, strict=True):
            one.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


class _Call:
    """One call of a tiled module.

    Args:
        tiled: what runs it.
        split: how its tensors are divided.
        needed: which of them need a gradient.
        forward: from the call's tensors, or a piece of them, to what the module returns.
        modes: that it runs under.

    Attributes:
        is_checked: its first piece is, as far as that takes no values: a trace on fakes sees no other call.
    """

    def __init__(
        self,
        tiled: TiledForward,
        split: _Split,
        needed: tuple[bool, ...],
        forward: Callable[[Sequence[Tensor]], Any],
        modes: _Modes,
    ) -> None:
        self.tiled, self.split, self.needed = tiled, split, needed
        self.forward, self.modes = forward, modes
        self.weights, self.is_checked = tiled.parameters, False
        self.entered: Any = None  # autograd's node that saved what enters
        self._structure: Any = None
        self._rest: list[Any] = []

    def run(self, tensors: list[Tensor]) -> Any:
        """What the module returns."""
        if not torch.is_grad_enabled() or not (self.weights or any(self.needed)):
            return self._rebuilt(self.run_pieces(tensors))
        entered: Sequence[Tensor] = tensors
        if any(self.needed):
            entered = _Enter.apply(self, *tensors)  # type: ignore[assignment]
        outputs: Any = _Run.apply(self, *entered, *self.weights)
        return self._rebuilt(outputs)

    def cut(self, tensors: Sequence[Tensor], piece: slice) -> list[Tensor]:
        """The tensors of a piece."""
        pairs = zip(tensors, self.split.tokenwise, strict=True)
        return [self.split.cut(tensor, piece) if divided else tensor for tensor, divided in pairs]

    def outputs_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the module returns for a piece."""
        leaves, self._structure = private.tree_flatten(self.forward(tensors))
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        return [leaves[place] for place in self._places]

    def is_tokenwise(self, output: Tensor, length: int) -> bool:
        """Whether an output of a piece of so many tokens has one part a token."""
        return output.ndim > self.split.dimension and output.shape[self.split.dimension] == length

    def run_pieces(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The module's outputs, each put together from those of the pieces."""
        split, whole = self.split, list[Tensor]()
        for piece in split.pieces:
            part = self.cut(tensors, piece)
            is_checked = self.is_checked and not piece.start
            outputs = _checked_outputs(self, part) if is_checked else self.outputs_of(part)
            length = piece.stop - piece.start
            for place, output in enumerate(outputs):
                if not self.is_tokenwise(output, length):
                    whole[place : place + 1] = [output if not piece.start else whole[place] + output]
                    continue
                if not piece.start:
                    shape = list(output.shape)
                    shape[split.dimension] = split.tokens
                    whole.append(output.new_zeros(shape))
                split.cut(whole[place], piece).copy_(output)
            del outputs
        return tuple(whole)

    def _rebuilt(self, outputs: Sequence[Tensor]) -> Any:
        leaves = list(self._rest)
        for place, output in zip(self._places, outputs, strict=True):
            leaves[place] = output
        return private.tree_unflatten(leaves, self._structure)


class _Enter(torch.autograd.Function):
    """The tensors that enter, unchanged; it saves them."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        call.entered = ctx
        ctx.save_for_backward(*tensors)
        entered = tuple(tensor.view_as(tensor) for tensor in tensors)
        pairs = zip(entered, call.needed, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, needed in pairs if not needed))
        return entered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, *grads


class _Run(torch.autograd.Function):
    """The outputs, piece by piece."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, count = call, len(call.needed)
        ctx.set_materialize_grads(False)
        if call.entered is None:
            ctx.save_for_backward(*tensors[:count])
        outputs = call.run_pieces([tensor.detach() for tensor in tensors[:count]])
        ctx.mark_non_differentiable(*(one for one in outputs if not one.dtype.is_floating_point))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        call: _Call = ctx.call
        tensors = (ctx if call.entered is None else call.entered).saved_tensors
        found = _Gradients(call, tensors, grads)
        with call.modes.again():
            if not call.tiled.compared and call.weights and not private.is_fake_mode_active():
                call.tiled.compared = True
                call.tiled.tiling.saw(found.difference())
        with call.modes.again():
            for piece in call.split.pieces:
                found.add(piece)
        return None, *found.of_tensors, *found.of_weights


class _Gradients:
    """The gradients of a call, piece by piece.

    Args:
        call: the call.
        tensors: what entered.
        grads: of the outputs.

    Attributes:
        of_tensors, of_weights: so far.
    """

    def __init__(self, call: _Call, tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
        self._call, self._tensors, self._grads = call, tensors, grads
        self.of_tensors: list[Tensor | None] = [None] * len(tensors)
        self.of_weights: list[Tensor | None] = [None] * len(call.weights)

    def add(self, piece: slice) -> None:
        """Run a piece forward and backward."""
        split, count = self._call.split, len(self._tensors)
        own, pairs = self._run(piece)
        found = _found(pairs, [*own, *self._call.weights])
        del own, pairs
        for place, gradient in enumerate(found[:count]):
            whole = self.of_tensors[place]
            if gradient is None:
                continue
            if not split.tokenwise[place]:
                self.of_tensors[place] = gradient if whole is None else whole + gradient
                continue
            if whole is None:
                whole = self.of_tensors[place] = torch.zeros_like(self._tensors[place])
            split.cut(whole, piece).copy_(gradient)
        for place in range(len(self.of_weights)):
            self.of_weights[place] = _sum(self.of_weights[place], found[count + place])
            found[count + place] = None

    def _run(self, piece: slice) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Run a piece forward: its tensors, and its outputs that have a gradient, each with that."""
        call, length = self._call, piece.stop - piece.start
        own = [tensor.detach() for tensor in call.cut(self._tensors, piece)]
        with torch.enable_grad():
            # views: hooks on a module's inputs ask whether backward reaches them, which no leaf can answer
            own = [
                tensor.requires_grad_().view_as(tensor) if needed else tensor
                for tensor, needed in zip(own, call.needed, strict=True)
            ]
            outputs = call.outputs_of(own)
        pairs = list[tuple[Tensor, Tensor]]()
        for output, gradient in zip(outputs, self._grads, strict=True):
            if gradient is not None and output.requires_grad:
                tokenwise = call.is_tokenwise(output, length)
                pairs.append((output, call.split.cut(gradient, piece) if tokenwise else gradient))
        return own, pairs

    def difference(self) -> float | None:
        """How far the gradients of weights are from their sums over pieces, on the first tokens: the largest
        difference as a share of a weight's largest gradient. One weight at a time takes little memory.
        ``None`` where random numbers are drawn.
        """
        split, modes = self._call.split, self._call.modes
        tokens, pieces = min(split.pieces[0].stop, _SAMPLE_TOKENS), len(split.pieces)
        length = max(1, math.ceil(tokens / pieces))
        starts, shares = range(0, tokens, length), [0.0]
        with _unseen():
            for weight in self._call.weights:
                before = modes.random_states()
                (whole,) = _found(self._run(slice(0, tokens))[1], [weight])
                if modes.random_states() != before:
                    return None
                parts: Tensor | None = None
                for at in starts:
                    pairs = self._run(slice(at, min(at + length, tokens)))[1]
                    parts = _sum(parts, _found(pairs, [weight])[0])
                if whole is not None and parts is not None and (most := whole.abs().max().item()):
                    shares.append((whole - parts).abs().max().item() / most)
        return max(shares)


def _found(pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of those of the tensors that need one; ``None`` for the others."""
    wanted = [place for place, tensor in enumerate(tensors) if tensor.requires_grad]
    found: list[Tensor | None] = [None] * len(tensors)
    if pairs and wanted:
        heads, given = zip(*pairs, strict=True)
        made = torch.autograd.grad(heads, [tensors[place] for place in wanted], given, allow_unused=True)
        for place, gradient in zip(wanted, made, strict=True):
            found[place] = gradient
    return found


def _sum(so_far: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Both added up; in place, unless the first has elements that share memory."""
    if so_far is None or more is None:
        return more if so_far is None else so_far
    return so_far + more if 0 in so_far.stride() else so_far.add_(more)


@contextmanager
def _unseen() -> Iterator[None]:
    """A limit records none of the operations in the block, which no later step repeats."""
    # a node that saved its own output itself would hold it for good
    with suspended(), private.saving(Tensor.detach, Tensor.detach):
        yield


# ---- the first call ---------------------------------------------------------------------------------


def _check(call: _Call, tensors: Sequence[Tensor]) -> None:
    """Refuse a module that is no function of single tokens: the first tokens of a call run twice, the second
    time with every other token exchanged. The outputs of the rest stay, where each is a function of its own.

    Raises:
        PlanError: it is none; says why.
    """
    split, name = call.split, call.tiled.name
    whole, length = _sampled(call, tensors), _sample_length(split)
    odd = torch.arange(1, length, 2, device=tensors[0].device)
    pairs = zip(whole, split.tokenwise, strict=True)
    mixed = [_exchanged(one, split.dimension, odd) if divided else one for one, divided in pairs]
    outputs = _checked_outputs(call, whole)
    with call.modes.again(), torch.no_grad():
        others = call.outputs_of(mixed)
    parts = list[list[Tensor]]()
    if length > 1 and not all(call.is_tokenwise(output, length) for output in outputs):
        halves = slice(0, length // 2), slice(length // 2, length)
        with call.modes.again(), torch.no_grad():
            parts = [call.outputs_of(call.cut(whole, half)) for half in halves]
    for place, (output, other) in enumerate(zip(outputs, others, strict=True)):
        if call.is_tokenwise(output, length):
            even = torch.arange(0, length, 2, device=output.device)
            if not _close(*(one.index_select(split.dimension, even) for one in (output, other))):
                raise PlanError(
                    f"{name}: its output for one token depends on other tokens. Tile a module that treats "
                    "each token alone: an MLP, a norm, an output layer"
                )
        elif parts and not _close(output, parts[0][place] + parts[1][place]):
            raise PlanError(
                f"{name}: it returns a tensor of shape {tuple(output.shape)} that is neither one value for "
                f"each of {length} tokens nor a sum over them. Return one value a token, or a sum, and "
                "reduce that outside of the module"
            )


def _sample_length(split: _Split) -> int:
    return min(split.pieces[0].stop, _SAMPLE_TOKENS)


def _sampled(call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The first tokens."""
    return [tensor.detach() for tensor in call.cut(tensors, slice(0, _sample_length(call.split)))]


def _checked_outputs(call: _Call, tensors: Sequence[Tensor]) -> list[Tensor]:
    """What the module returns for the first tokens.

    Raises:
        PlanError: it writes to its buffers, reads a weight of another module, lets a tensor out that has a
            gradient and that it does not return, or makes logits in pieces itself.
    """
    module, name = call.tiled.module, call.tiled.name
    buffers = {key: (one, private.version(one)) for key, one in module.named_buffers()}
    saved = weakref.WeakSet[_Saved]()

    def pack(tensor: Tensor) -> _Saved:
        saved.add(one := _Saved(tensor))
        return one

    with call.modes.again(), torch.enable_grad():
        own = [one.detach().requires_grad_(needed) for one, needed in zip(tensors, call.needed, strict=True)]
        try:
            with private.saving(pack, _Saved.get):
                outputs = call.outputs_of(own)
        except Exception as error:
            tokens = tensors[0].shape[call.split.dimension]
            error.add_note(f"{name}: the module ran on a piece of {tokens} tokens")
            raise
        _check_weights(call, outputs, own)
    if any(isinstance(output, Logits) for output in outputs):
        raise PlanError(f"{name}: chunked_loss makes its output in pieces already. Leave it out of the tiles")
    outputs = [output.detach() for output in outputs]
    if saved:
        gc.collect()  # what only a cycle holds is not in use
    if saved:
        raise PlanError(
            f"{name}: a tensor that has a gradient leaves it other than as a result of its forward (the loss "
            "of a router that is kept as an attribute, or what a forward hook collects, as with "
            "output_router_logits=True of transformers). Pieces would lose this gradient: return the tensor, "
            "or tile the modules inside that do not make it"
        )
    now = dict(module.named_buffers())
    for key, (one, version) in buffers.items():
        if now.get(key) is not one or private.version(one) != version:
            raise PlanError(
                f"{name}: its forward writes to its buffer {key!r}, and would do so for each piece. Tile a "
                "module inside it that has no such buffer"
            )
    return outputs


class _Saved:
    """A tensor that autograd holds: as long as this is there, so is the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()  # an output of a node would hold the node that holds it

    def get(self) -> Tensor:
        """The tensor."""
        return self._tensor


def _exchanged(tensor: Tensor, dimension: int, odd: Tensor) -> Tensor:
    """The tensor with the first of the odd tokens, its sign changed where it has one, in place of all of
    them.
    """
    if not len(odd):
        return tensor
    one = tensor.narrow(dimension, 1, 1)
    one = -one if tensor.dtype.is_floating_point else one
    shape = list(tensor.shape)
    shape[dimension] = len(odd)
    return tensor.index_copy(dimension, odd, one.expand(shape))


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two outputs differ by no more than rounding does. Of what is infinite nothing is known."""
    if not one.dtype.is_floating_point or not one.numel():
        return torch.equal(one, other)
    most = one.abs().amax().item()
    allowed = math.sqrt(torch.finfo(one.dtype).eps) * most
    return not math.isfinite(most) or bool((one - other).abs().amax().item() <= allowed)


def _check_weights(call: _Call, outputs: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Refuse a module whose output depends on a tensor that has a gradient, and that is neither its own nor
    given to it: pieces would lose that gradient.
    """
    known = {id(tensor) for tensor in (*own, *call.weights)}
    nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise PlanError(
                f"{call.tiled.name}: its forward reads a tensor of shape {tuple(variable.shape)} that has a "
                "gradient, and is neither a parameter of this module nor an argument of the call. Make it an "
                "argument, or tile a module that owns it"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
