"""The reference trainer: trains a language model on text under a memory budget.

In: the options of ``lowtide train``. Out: a trained model, checkpoints, and a `TrainResult` that proves what
the budget did: one plain and one planned step, side by side. Begin with `trainer.py`, which reads top to
bottom.
"""
