"""The traced truth behind the closed form: a step of any size on fake tensors, one rank of each stage. This
part of the room needs torch.
"""

from lowtide.estimate.simulation.compare import Row
from lowtide.estimate.simulation.compose import Chunk, Moment, StageTimeline, compose
from lowtide.estimate.simulation.simulate import StageSimulation, StepSimulation, simulate

__all__ = [
    "Chunk",
    "Moment",
    "Row",
    "StageSimulation",
    "StageTimeline",
    "StepSimulation",
    "compose",
    "simulate",
]
