"""The reference trainer: trains a language model on text under a memory budget and proves what the budget
did.
"""
