"""Look: from a step to its `StepGraph`.

Comes in: a step, operation by operation, and what autograd saves. Goes out: the graph as plain data, with the
seconds and scratch bytes of its operations. `tracer` is what every trace is made of, `eager` records a step
that runs, `fake` one that cannot run here, `costs` times operations for that one.

``lowtide.trace(step, *args)`` is the verb; see `lowtide.run.look.step.trace`.
"""
