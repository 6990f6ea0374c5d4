"""The traced truth behind the closed form: a step of any size on fake tensors. It needs torch.

In: a `Config` of `lowtide.estimate`. Out: a `StepSimulation`: one rank of each pipeline stage asked for, its
live bytes over time, and rows that compare them with the formulas. Begin with `simulate.py`.
"""

from lowtide.estimate.simulation.compare import Row
from lowtide.estimate.simulation.compose import Chunk, Moment, StageTimeline, compose
from lowtide.estimate.simulation.simulate import StageSimulation, StepSimulation, simulate

__all__ = [
    "Chunk", "Moment", "Row", "StageSimulation", "StageTimeline", "StepSimulation", "compose", "simulate",
]  # fmt: skip
