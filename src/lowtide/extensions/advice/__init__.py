"""Refusals in a user's words: what holds the memory, by names that a user knows, and what would help.

`words.py`    the text of a `lowtide.BudgetError`, of its facts
`refusal.py`  the facts of the planner's refusal become those of a user's step
`out_of_memory.py`  what to say of limited models when their device has no memory left
"""
