"""Names of language models: one model's spellings, which every command takes, in either case.

``train``, ``plan`` and ``report`` build models (`lowtide.models`), ``estimate``, ``simulate`` and ``suggest``
have formulas for them (`lowtide.estimate`). Each side has names of its own; `meant` finds the one that a name
stands for there.
"""

from __future__ import annotations

from collections.abc import Iterable

HUGGING_FACE_PREFIX = "hf:"

HUGGING_FACE = {
    "llama-7b": "hf:llama",
    "mistral-7b": "hf:mistral",
    "mixtral-8x7b": "hf:mixtral",
    "mixtral-8x22b": "hf:mixtral:hidden_size=6144,num_hidden_layers=56,num_attention_heads=48,"
    "intermediate_size=16384",
    "deepseek-v3": "hf:deepseek_v3",
    "gpt-oss-20b": "hf:gpt_oss:num_hidden_layers=24,num_local_experts=32",
    "gpt-oss-120b": "hf:gpt_oss",
}
"""Published models as transformers builds them: most are what a type is without settings."""

HUB = {
    **{f"llama3-{size}": f"meta-llama/Llama-3.2-{size.upper()}" for size in ("1b", "3b")},
    **{f"llama3-{size}": f"meta-llama/Meta-Llama-3-{size.upper()}" for size in ("8b", "70b")},
    **{f"llama2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    **{f"qwen3-{size}": f"Qwen/Qwen3-{size.upper()}"
       for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "30b-a3b", "235b-a22b")},
    **{f"qwen2-{size}": f"Qwen/Qwen2.5-{size.upper()}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-{size}": f"Qwen/Qwen2.5-{size.upper()}" for size in ("3b", "14b", "32b")},
    **{f"qwen-{size}": f"Qwen/Qwen-{size[:-1]}B" for size in ("1.8b", "7b", "14b", "72b")},
    **{f"yi-{size}": f"01-ai/Yi-{size.upper()}" for size in ("6b", "9b", "34b")},
    **{f"opt-{size}": f"facebook/opt-{size}"
       for size in ("125m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
    **{f"pythia-{size}": f"EleutherAI/pythia-{size}"
       for size in ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b")},
    **{f"bloom-{size}": f"bigscience/bloom-{size}" for size in ("560m", "1b1", "1b7", "3b", "7b1")},
    **{f"starcoder2-{size}": f"bigcode/starcoder2-{size}" for size in ("3b", "7b", "15b")},
    **{f"gemma-{size}": f"google/gemma-{size}" for size in ("2b", "7b")},
    **{f"falcon-{size}": f"tiiuae/falcon-{size}" for size in ("7b", "40b")},
    **{name: f"microsoft/{name}" for name in ("phi-2", "phi-4")},
    **{name: f"openai/{name}" for name in ("gpt-oss-20b", "gpt-oss-120b")},
    **{name: f"openai-community/{name}" for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "mistral-7b": "mistralai/Mistral-7B-v0.3", "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3", "glm4.5-air": "zai-org/GLM-4.5-Air",
    **{f"codellama-{size}": f"codellama/CodeLlama-{size}-hf" for size in ("7b", "13b", "34b")},
    "phi-1.5": "microsoft/phi-1_5", "phi-3-mini": "microsoft/Phi-3-mini-4k-instruct",
    "phi-4-mini": "microsoft/Phi-4-mini-instruct", "bloom-176b": "bigscience/bloom",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "gpt-neox-20b": "EleutherAI/gpt-neox-20b",
    "mistral-nemo-12b": "mistralai/Mistral-Nemo-Base-2407", "powerlm-3b": "ibm/PowerLM-3b",
    "mistral-small-24b": "mistralai/Mistral-Small-24B-Base-2501",
}  # fmt: skip
"""Where the hub has published models' weights."""

_ALIASES = {
    "gpt-22b": "22b", "gpt3-175b": "175b", "gpt3": "175b", "gpt-175b": "175b", "mt-nlg-530b": "530b",
    "gpt-530b": "530b", "gpt-1t": "1t",
    "llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "llama3.1-405b": "llama3-405b",
    "llama-3-8b": "llama3-8b",
    "llama-3-70b": "llama3-70b", "llama-2-7b": "llama2-7b", "llama-2-13b": "llama2-13b",
    "llama-2-70b": "llama2-70b",
    "llama3.3-70b": "llama3-70b",
    **{f"qwen2.5-{size}": f"qwen2-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    "mixtral": "mixtral-8x7b", "tinyllama": "tinyllama-1.1b", "bloom": "bloom-176b",
    "santacoder": "santacoder-1b",
    "intellect-3": "glm4.5-air", "gpt-oss": "gpt-oss-20b",
    "llama3.2-1b": "llama3-1b", "llama-1b": "llama3-1b", "llama3.2-3b": "llama3-3b", "gpt2-small": "gpt2",
    **{spelling: name for name, spelling in HUGGING_FACE.items()},
}  # fmt: skip


_SUFFIXES = ("-hf", "-instruct", "-base", "-chat")


def _plain(name: str) -> str:
    """The name without what says for what it was trained."""
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def on_hub(name: str) -> str | None:
    """The name here of what the hub calls ``OWNER/NAME``; ``None`` where that is not known. A model and its
    variants for chats have one shape, and versions whose shapes are alike have one name.

    >>> on_hub("meta-llama/Llama-3.1-8B"), on_hub("Qwen/Qwen3-8B-Base"), on_hub("somebody/new")
    ('llama3-8b', 'qwen3-8b', None)
    """
    plain = _plain(name.lower())
    for model, theirs in HUB.items():
        if plain == theirs.lower().removesuffix("-hf"):
            return model
    last = plain.rpartition("/")[2].removeprefix("meta-")
    for spelling in (last, last.replace("-", "", 1)):
        found = _ALIASES.get(spelling, spelling)
        if found in HUB or found in _ALIASES.values():
            return found
    return None


def meant(name: str, known: Iterable[str]) -> str | None:
    """Which of the names that are known somewhere a name stands for; ``None`` where it is none of them.

    Args:
        name: in either case.
        known: one spelling of each model.

    A model and its variants for chats have one shape.

    >>> meant("Llama3.1-8B", ["gpt2", "llama3-8b"]), meant("gpt3", ["gpt3-175b"]), meant("a.json", ["gpt2"])
    ('llama3-8b', 'gpt3-175b', None)
    >>> meant("Llama-3.1-8B-Instruct", ["gpt2", "llama3-8b"])
    'llama3-8b'
    """
    given, known = name.lower(), set(known)
    plain = _plain(given)
    for spelling in dict.fromkeys((given, plain, plain.replace("-", "", 1))):
        model = _ALIASES.get(spelling, spelling)
        spellings = {spelling, model, *(other for other, same in _ALIASES.items() if same == model)}
        if found := spellings & known:
            return spelling if spelling in found else min(found)
    return None
