"""Profile a first step: run it for real, in little memory, and record its `StepGraph`.

In: a model's forward and its arguments, or a function that ends in a loss. Out: a `StepGraph`.
Begin with `profiler.py`; `step.py` is `lowtide.trace`.
"""
