"""The compiled engine: a budget under `torch.compile` (docs/compiled.md).

In: a model and a budget. Out: what `torch.compile` returns, each graph cut between forward and backward where
a plan says. Begin with `api.py`, then `partitioner.py`, which AOTAutograd calls.
"""
