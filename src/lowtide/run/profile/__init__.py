"""Profile a first step: run it for real, in little memory, and record its `StepGraph`.

In: a model's forward and its arguments, or a function that ends in a loss. Out: a `StepGraph`. Begin with
`profiler.py`: it sees each operation, which the `Tracer` (`lowtide.trace.tracer`) writes down, `segments.py`
brings back what autograd saves from where few bytes cross, `saved.py` is what autograd holds of it, and
`costs.py` measures. `trace_step.py` is `lowtide.trace`.
"""
