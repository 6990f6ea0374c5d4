"""The GPT-NeoX example: it is the Hugging Face model, and it trains alike on one and two processes and under
a budget.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import needs_gloo, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide import parallel as lp

pytestmark = needs_gloo
FILE = Path(__file__).parents[2] / "examples" / "gpt_neox.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_neox_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(budget: str | None) -> list[float]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    return example().train(
        init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",)), 6, budget
    )


def test_it_trains_alike_everywhere() -> None:
    (alone,) = on_ranks(1, trained, None)
    plain = on_ranks(2, trained, None)
    assert alone[-1] < alone[0]
    assert plain[0] == plain[1] == pytest.approx(alone, abs=1e-4)


@pytest.mark.slow
def test_it_trains_alike_under_a_budget() -> None:
    assert on_ranks(2, trained, "75%") == on_ranks(2, trained, None)


def same_as_hugging_face() -> float:
    transformers = pytest.importorskip("transformers")
    module, config = example(), example().Config()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    torch.manual_seed(1)
    rival = transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **{name: getattr(config, name) for name in names}, rotary_pct=0.25, use_cache=False
        )
    ).double()
    model = module.GPTNeoX(config, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))).double()
    lp.load_whole_state_dict(model, rival.state_dict())
    tokens = module.batch(0)
    return abs(float(model(tokens) - rival(input_ids=tokens, labels=tokens).loss))


def test_it_is_the_hugging_face_model() -> None:
    assert all(difference < 1e-5 for difference in on_ranks(2, same_as_hugging_face))
