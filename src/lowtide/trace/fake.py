"""Lend a module fake tensors for the length of a trace, and leave it as it was."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lowtide import private
from lowtide.errors import TraceError
from lowtide.ops import OpInfo, has_plain_storage
from lowtide.private import FakeTensor, FakeTensorMode

SMALL_BYTES = 1 << 24
"""Tensors of integers and truth values up to this size are real in a trace."""


class Faker:
    """Turns real tensors into fake ones: the same tensor always into the same fake, views of one storage into
    views of one storage.

    Small tensors of integers and truth values (token ids, masks, positions) are copied instead: models branch
    on what is in them, and some behave differently when they see a fake one.

    Args:
        mode: the fake tensor mode; made with ``allow_non_fake_inputs`` so that constants inside a model need
            no care.
    """

    def __init__(self, mode: FakeTensorMode | None = None) -> None:
        self.mode = mode or private.fake_mode()
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The fake of one tensor: same geometry, device, ``requires_grad``; its ``grad`` has a fake of its
        own.
        """
        found = self._made.get(id(real))
        if found is not None:
            return found[1]
        if is_small_constant(real):
            with private.without_fake_mode():
                copy = real.detach().clone()
            self._made[id(real)] = (real, copy)
            return copy
        source = real.detach() if not real.is_leaf else real
        fake = self.mode.from_tensor(source, static_shapes=True)
        if real.requires_grad and not fake.requires_grad:
            fake.requires_grad_()
        if real.is_leaf and real.grad is not None and fake.grad is None:
            fake.grad = self.tensor(real.grad)
        self._made[id(real)] = (real, fake)
        # marks that a model sets on its parameters and asks for in forward
        for name, item in vars(real).items():
            if name not in vars(fake):
                setattr(fake, name, _swap_attribute(self, item))
        return fake

    def give_up(self) -> list[weakref.ref[torch.UntypedStorage]]:
        """Forget every fake that was made; returns what tells whether somebody else still holds one."""
        watches = [
            weakref.ref(fake.untyped_storage())
            for _, fake in self._made.values()
            if private.is_fake_of(fake, self.mode)
        ]
        self._made.clear()
        return watches

    def put_back(self) -> None:
        """The modules have their own tensors again: nothing was done to those."""

    def tree(self, items: Any) -> Any:
        """The same nest of containers with fake tensors in place of real ones."""
        return private.tree_map_only(torch.Tensor, self.tensor, items)


class Unchanged(Faker):
    """Lends a module its own tensors, for a forward on real ones after which nothing is to be left."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def tensor(self, real: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        if real.is_leaf and id(real) not in self._before and has_plain_storage(real):
            self._before[id(real)] = real, real.data
            if real.grad is not None:
                self.tensor(real.grad)
        return real

    def put_back(self) -> None:
        """Every tensor has the data that it had: a module that is converted within its forward gives its
        parameters other ones.
        """
        for tensor, before in self._before.values():
            if tensor.dtype != before.dtype or private.storage_key(tensor) != private.storage_key(before):
                tensor.data = before
        self._before.clear()


def is_small_constant(tensor: torch.Tensor) -> bool:
    """Whether a trace keeps the tensor real: small, without gradients, of integers or truth values."""
    if tensor.requires_grad or tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and tensor.numel() * tensor.element_size() <= SMALL_BYTES


def laid_out(info: OpInfo, args: tuple[Any, ...], result: Any) -> Any:
    """What a call on fake tensors returned, with the strides that the CPU's kernel gives it: what follows
    goes other ways by them.

    Batch norm writes what is contiguous or channels-last, and where both names fit, contiguous; its fake
    keeps the strides of the input, those of dimensions of one element included. Source:
    ``suggest_memory_format_contig`` in ATen/native/Normalization.cpp.
    """
    forward = info.name.startswith(_BATCH_NORMS)
    if not forward and info.name != "aten.native_batch_norm_backward.default":
        return result
    first, *others = result
    given = args[:1] if forward else (args[1], args[0])
    if first is None or first.device.type != "cpu" or first.numel() == 0:
        return result
    suggested = private.suggested_memory_format(given[0])
    alike = all(
        _gapless(tensor) is not None and private.suggested_memory_format(tensor) == suggested
        for tensor in given
    )
    layout = (_gapless(given[0]) if alike else None) or suggested
    wanted = torch.empty(first.shape, device="meta", memory_format=layout).stride()
    if first.stride() != wanted:
        first = torch.empty_strided(first.shape, wanted, dtype=first.dtype, device=first.device)
    return (first, *others)


def grouped(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    _bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """What a product of matrices in groups returns for fake tensors: the fake kernel refuses what is not of
    bfloat16, which real ones take.

    Source: ``create_grouped_gemm_output_tensor`` in ATen/native/GroupedMMUtils.h, which pads rows to 16 bytes
        where PyTorch is built for CUDA.
    """
    dtype, rows, columns = out_dtype or first.dtype, first.shape[-2], second.shape[-1]
    if first.dim() != second.dim():
        shape: tuple[int, ...] = (rows, columns)
    elif offs is not None and first.dim() == 2:
        shape = (offs.shape[0], rows, columns)
    else:
        shape = (first.shape[0], rows, columns)
    step = 16 // dtype.itemsize if torch.version.cuda else 1
    wide = -(-columns // step) * step
    strides = (rows * wide, wide, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


_BATCH_NORMS = ("aten.native_batch_norm.", "aten._native_batch_norm_legit")


def _gapless(tensor: torch.Tensor) -> torch.memory_format | None:
    """The first format in which the tensor has no gaps, or ``None``."""
    formats = [torch.contiguous_format]
    formats += (
        [torch.channels_last] if tensor.dim() == 4 else [torch.channels_last_3d] if tensor.dim() == 5 else []
    )
    return next((layout for layout in formats if tensor.is_contiguous(memory_format=layout)), None)


def refuse_strangers(inputs: list[torch.Tensor]) -> None:
    """A call on real tensors that train, which a trace on fake tensors knows nothing of.

    Raises:
        TraceError: one is among the inputs.
    """
    for tensor in inputs:
        # ``is_leaf`` of a fake view may wait for a lock that autograd holds around this very call
        if not isinstance(tensor, FakeTensor) and tensor.requires_grad and tensor.is_leaf:
            raise TraceError(
                f"the step uses a trainable tensor of shape {tuple(tensor.shape)} that the trace does not "
                "know: pass the module that owns it as model=, or leave fake=True out"
            )


def _swap_attribute(faker: Faker, item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return faker.tensor(item)
    if isinstance(item, (list, tuple)) and any(isinstance(part, torch.Tensor) for part in item):
        return type(item)([_swap_attribute(faker, part) for part in item])
    if isinstance(item, dict) and any(isinstance(part, torch.Tensor) for part in item.values()):
        return {key: _swap_attribute(faker, part) for key, part in item.items()}
    return item


def _contents(attributes: dict[str, Any]) -> list[tuple[Any, Any]]:
    """The containers among a module's attributes, its tables of hooks and submodules included, each with a
    copy of what is in it.
    """
    return [(item, item.copy()) for item in attributes.values() if isinstance(item, (dict, list, set))]


def _put_back(container: Any, before: Any) -> None:
    """Let a container hold again what it held before."""
    if len(container) == len(before):
        pairs = (
            [(container, before)]
            if not isinstance(container, dict)
            else [(container, before), (container.values(), before.values())]
        )
        if all(a is b for now, then in pairs for a, b in zip(now, then, strict=True)):
            return
    container.clear()
    if isinstance(container, list):
        container.extend(before)
    else:
        container.update(before)


@contextmanager
def borrowed(modules: list[torch.nn.Module], faker: Faker) -> Iterator[None]:
    """Give every parameter, buffer and tensor attribute of ``modules`` a fake for the length of the block.

    Afterwards each module's attributes are what they were, and what its containers hold, too: a module that
    caches tensors on itself keeps no fake ones, and one that installs hooks at its first step and notes that
    it did has neither the hooks nor the note.
    """
    snapshots: list[tuple[torch.nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
    seen: set[int] = set()
    try:
        for root in modules:
            for module in root.modules():
                if id(module) in seen:
                    continue
                seen.add(id(module))
                attributes = dict(module.__dict__)
                snapshots.append((module, attributes, _contents(attributes)))
                for name, parameter in module._parameters.items():
                    if parameter is not None:
                        module._parameters[name] = faker.tensor(parameter)  # type: ignore[assignment]
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = faker.tensor(buffer)
                for name, item in attributes.items():
                    if name not in ("_parameters", "_buffers", "_modules"):
                        swapped = _swap_attribute(faker, item)
                        if swapped is not item:
                            module.__dict__[name] = swapped
        yield
    finally:
        for module, attributes, contents in snapshots:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, before in contents:
                _put_back(container, before)
        faker.put_back()
