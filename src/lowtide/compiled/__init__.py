"""The compiled engine: a budget under `torch.compile` (docs/compiled.md).

In: a model and a budget. Out: what `torch.compile` returns, each graph cut between forward and backward where
a plan says. Begin with `flow.py`: capture a graph (`capture.py`, as `joint.py` sees it), profile its step
(`timeline.py`, `steps.py`), choose its candidate cut (`choose_cuts.py`), which is priced (`price.py`,
`lower.py`), cut and compile.
"""
