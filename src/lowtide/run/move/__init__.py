"""Values that leave the device, or change their form, between forward and backward.

In: a plan's moves and the stores. Out: the values, in time for backward. All of it is in `engine.py`.
"""
