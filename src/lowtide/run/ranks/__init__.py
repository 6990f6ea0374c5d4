"""Ranks that share a model share a plan.

In: the step graphs of several ranks. Out: one plan, and what one of them learned told to all (`agree.py`).
"""
