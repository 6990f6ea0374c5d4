"""The compiled engine: a budget under `torch.compile`, see docs/compiled.md.

In: a model and a budget. Out: what `torch.compile` returns, cut between forward and backward where
a plan says.
"""
