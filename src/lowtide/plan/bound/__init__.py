"""How good a plan can be at best, by linear programs.

In: a `Simulator` and a budget. Out: a `Bound`: seconds that no schedule within the budget undercuts, and the
smallest peak; and the relaxed decisions that reach it, which the search rounds. Begin with
`relaxation.py`.
"""
