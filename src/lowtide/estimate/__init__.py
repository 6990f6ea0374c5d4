"""Will it fit? Memory, FLOPs and traffic of a training step by closed formulas, without a GPU and without
torch.

In: a model and how it is trained (`configure`), or the flags of ``lowtide estimate`` and ``lowtide suggest``.
Out: an `Estimate`; each term names its equation. `lowtide.estimate.suggest` looks for parallel sizes that
fit. `lowtide.estimate.simulation` puts a traced step beside the formulas, and alone needs torch.
"""

from lowtide.estimate.config import Config
from lowtide.estimate.errors import EstimateError
from lowtide.estimate.flops import Flops, iteration_flops, utilization
from lowtide.estimate.hugging_face import from_hugging_face, read_hugging_face
from lowtide.estimate.lines import Line, Stage
from lowtide.estimate.presets import PRESETS, preset
from lowtide.estimate.settings import configure, read_config
from lowtide.estimate.shape import Shape
from lowtide.estimate.states import ModelStates, model_states
from lowtide.estimate.total import Estimate, estimate
from lowtide.estimate.traffic import Traffic

__all__ = [
    "PRESETS", "Config", "Estimate", "EstimateError", "Flops", "Line", "ModelStates", "Shape", "Stage",
    "Traffic", "configure", "estimate", "from_hugging_face", "iteration_flops", "model_states", "preset",
    "read_config", "read_hugging_face", "utilization",
]  # fmt: skip
