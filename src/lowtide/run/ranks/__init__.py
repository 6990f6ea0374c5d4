"""Ranks that share a model share a plan.

In: the step graphs of several ranks. Out: one plan for all of them, from the findings of all (`agree.py`).
"""
