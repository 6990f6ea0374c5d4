"""Models to train and to measure.

In: a name (``gpt2``, ``hf:llama:...``, a folder) or a `ModelConfig`. Out: a module that returns its loss: a
GPT and a Llama that read top to bottom, or a model of transformers. Begin with `gpt.py`; `build.py` reads
names, `presets.py` has shapes.
"""

from lowtide.models.build import ModelSpec, build_model, model_spec
from lowtide.models.common import CausalOutput
from lowtide.models.presets import PRESETS, ModelConfig, ModelError, preset

__all__ = [
    "PRESETS",
    "CausalOutput",
    "ModelConfig",
    "ModelError",
    "ModelSpec",
    "build_model",
    "model_spec",
    "preset",
]
