"""Gradients in one contiguous tensor."""

from lowtide.extensions.moves.store.gradients import GradientSlab

__all__ = ["GradientSlab"]
