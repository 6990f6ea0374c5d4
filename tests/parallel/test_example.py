"""The examples: GPT-NeoX is the Hugging Face model, and it trains alike on one and two processes and under a
budget; torchtitan's Llama 3 trains under its own FSDP2 within one.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_each_backend, on_ranks
from torch.distributed.device_mesh import init_device_mesh

import lowtide
from lowtide import parallel as lp

pytestmark = on_each_backend
EXAMPLES = Path(__file__).parents[2] / "examples"
TITAN = EXAMPLES / "torchtitan_llama3.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_neox_example", EXAMPLES / "gpt_neox.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(budget: str | None) -> list[float]:
    warnings.simplefilter("ignore", lowtide.LowtideWarning)
    return example().train(
        init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),), mesh_dim_names=("tp",)),
        6,
        budget,
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
    model = module.GPTNeoX(
        config, init_device_mesh(torch.get_default_device().type, (2,), mesh_dim_names=("tp",))
    ).double()
    lp.load_whole_state_dict(model, rival.state_dict())
    tokens = module.batch(0)
    return abs(float(model(tokens) - rival(input_ids=tokens, labels=tokens).loss))


def test_it_is_the_hugging_face_model() -> None:
    assert all(difference < 1e-5 for difference in on_ranks(2, same_as_hugging_face))


def torchtitan(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The example on two processes."""
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(TITAN), *arguments]
    about = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(start, env=about, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_torchtitans_llama_takes_one_line_more() -> None:
    pytest.importorskip("torchtitan.models.llama3")
    done = torchtitan("--steps", "3")
    assert done.returncode == 0, done.stderr
    taken, budget = re.findall(r"a step took ([\d,]+) bytes within ([\d,]+)", done.stdout)[0]
    assert int(taken.replace(",", "")) <= int(budget.replace(",", ""))


def test_without_torchtitan_the_example_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(SystemExit, match="pip install torchtitan"):
        runpy.run_path(str(TITAN))["llama"]("debugmodel", torch.get_default_device())
