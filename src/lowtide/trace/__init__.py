"""Look: from a step to its `StepGraph`.

In: a step, operation by operation, and what autograd saves. Out: the graph as plain data, with the seconds
and scratch bytes of its operations. `tracer` is what every trace is made of, `eager` writes down a step that
runs, `fake` one that cannot run here; `costs` times operations for that one. What runs the step and stands
between autograd and it is `lowtide.run.profile`, `lowtide.trace` among it.
"""
