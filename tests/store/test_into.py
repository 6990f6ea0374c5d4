"""Operations that write into memory they are given: the same bits, in tensors that look the same, on every family of models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.into import Geometry, Unknown, form_of, into_of, overload
from lowtide.ops import tensors_of
from lowtide.store.slab import Slab

CPU = torch.device("cpu")
FAMILIES = {family.name: family for family in zoo.FAMILIES}
EVERY_TIME = ("gpt2", "bert", "bart", "vit", "resnet", "mamba", "mixtral", "unet")


class Twice(TorchDispatchMode):
    """Runs every operation that can a second time, into dirty memory within a slab, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.slab = Slab(CPU, 1 << 26)
        self.slab.memory.fill_(0x5A)
        self.compared: dict[str, int] = {}
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        into = into_of(func, "cpu")
        again = list(args)  # not copies: those of tensors with gaps have other strides, and kernels go other ways
        if func is torch.ops.aten.native_batch_norm.default:
            again = [t.clone() if isinstance(t, torch.Tensor) else t for t in args]  # its statistics are overwritten
        result = func(*args, **kwargs)
        if into is None:
            return result
        flat = list(tensors_of(result))
        looks = into.looks(args, kwargs)
        if looks is None:
            self.unknown.add(str(func))
            return result
        for tensor, look in zip(flat, looks, strict=True):
            assert (tensor.shape, tensor.stride(), tensor.dtype) == look[:3], func
            assert tensor.untyped_storage().nbytes() == look.bytes, func
        if into.kind == "empty":
            return result
        at, memory = 512, []
        for look in looks:
            tensor = self.slab.tensor(at, look)
            assert tensor is not None
            memory.append(tensor)
            at += -(-look.bytes // 512) * 512
        for tensor, found in zip(flat, tensors_of(into.run(again, kwargs, memory)), strict=True):
            assert torch.equal(bits(tensor), bits(found)), func
            assert found.untyped_storage().nbytes() == found.nbytes and found.storage_offset() == 0
        self.compared[str(func)] = self.compared.get(str(func), 0) + 1
        return result


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("name", [name if name in EVERY_TIME else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES])
@pytest.mark.usefixtures("quiet_transformers")
def test_the_same_bits_in_memory_that_is_given(name: str) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = FAMILIES[name].build()
    mode = Twice()
    with mode:
        model.train()(**batch)
    assert sum(mode.compared.values()) > 5 and len(mode.compared) > 3


def test_special_numbers_and_strides() -> None:
    special = torch.tensor([float("nan"), -0.0, 0.0, float("inf"), -float("inf"), 1e-45, -1.0, 2.0]).repeat(8, 3)
    with Twice() as mode:
        for x in (special, special.t(), special[:, ::2], special.double(), special.bfloat16(), torch.arange(-9, 9)):
            torch.relu(x)
            x.clone()
            x.to(torch.float64)
            x.to(torch.bool)
            x + 1
            x * 1.5
            x.contiguous(memory_format=torch.contiguous_format)
        image = torch.randn(2, 4, 6, 6).to(memory_format=torch.channels_last)
        norm = torch.nn.BatchNorm2d(4)
        norm(image)
        norm(image.contiguous())
        torch.nn.functional.max_pool2d(image, 2)
        torch.cat([image, image * 2], 1)
    assert mode.compared["aten.relu.default"] == 6
    assert mode.compared["aten.native_batch_norm.default"] == 1 and mode.unknown == {"aten.native_batch_norm.default"}


def test_what_cannot_be_given_memory() -> None:
    aten = torch.ops.aten
    random, generated = (aten.bernoulli.default, aten.native_dropout.default), (aten.native_layer_norm.default, aten.embedding.default)
    for func in (*random, *generated, aten.view.default, aten.add_.Tensor, aten.empty.memory_format):
        assert into_of(func, "cpu") is None, func
    assert overload("aten.addmm.default") is aten.addmm.default and overload("aten.gone.default") is None and overload("aten.addmm") is None
    mul = into_of(aten.mul.Tensor, "cpu")
    assert mul is not None
    assert mul.looks((torch.randn(3, dtype=torch.complex64), 2), {}) is None
    assert mul.looks((torch.empty(0), 2), {}) is None  # nothing to place
    assert mul.looks((torch.randn(2, 3).t(), 2.0), {}) == (Geometry((3, 2), (1, 3), torch.float32, 24),)
    with pytest.raises(Unknown):
        form_of((torch.eye(2).to_sparse(), 2), {}, CPU)
    with pytest.raises(Unknown):
        form_of((torch.empty(2, device="meta"), 2), {}, CPU)
    with pytest.raises(Unknown):
        form_of((torch.Generator(),), {}, CPU)
    x = torch.ones(2)
    forms = [form_of((x, number), {}, CPU) for number in (1, 1.0, True)]
    assert len(set(forms)) == 3  # equal numbers, other results
    assert form_of(([x, x], 1), {"dim": 0}, CPU) == form_of(([x + 1, x], 1), {"dim": 0}, CPU) != form_of(([x, x], 1), {"dim": 1}, CPU)
