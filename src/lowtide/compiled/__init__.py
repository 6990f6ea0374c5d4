"""The compiled engine: a budget under `torch.compile` (docs/compiled.md).

In: a model and a budget. Out: what `torch.compile` returns, each graph cut between forward and backward where
a plan says. Begin with `flow.py`; the others in the order in which a step comes to them:

`api.py`      `lowtide.compile`, and `compile_options`
`flow.py`     the steps of a model: captured, recorded, planned for, run
`capture.py`  a graph that Dynamo has captured, and what compiles it
`joint.py`    forward and backward of a graph as the planner sees them
`timeline.py` a recorded step: what ran in which order, and what was live beside it
`steps.py`    a step's graphs as one `StepGraph`
`planning.py` plans a step that was recorded, or that is one graph
`dynamic.py`  graphs that leave sizes open
`choose_cuts.py`  the cut of every call of a step, within the budget
`price.py`    what a candidate cut takes and costs
`lower.py`    what its two halves do to memory
`vector_costs.py`  what is slow in Inductor's C++ kernels, measured
`cut.py`      a graph, cut in two
`moving.py`   what goes to the host or a disk between the two
`shelf.py`    plans on disk
`compiled_handle.py`  what users hold
"""
