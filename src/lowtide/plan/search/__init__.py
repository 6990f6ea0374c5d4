"""The least extra time within a budget.

In: a `StepGraph` and a budget in bytes. Out: the stored values (`Search`), or the stored and the moved
ones (`MixedSearch`), that add the least seconds; or a refusal with the smallest budget that can be met.
Begin with `search.py`.
"""
