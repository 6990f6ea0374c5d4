"""Write a step down: from its operations, and from what autograd saves, to the `StepGraph`.

In: a step, operation by operation. Out: the graph as plain data. `tracer` writes any step down; `fake` runs
one on tensors without memory, and `costs` times its operations; `transforms` makes of a recorded step the one
that runs. A step that runs for real is profiled (`lowtide.run.profile`).
"""
