"""Models to train and to measure: a GPT and a Llama that read top to bottom, presets of their shapes, and
Hugging Face configurations.
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
