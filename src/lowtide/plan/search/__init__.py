"""The least extra time within a budget.

In: a `StepGraph` and a budget in bytes. Out: the set of stored values (`Planner`), or of stored and moved
ones (`Mixer`), with the least seconds that is found; or a refusal with the smallest budget that can be met.
"""
