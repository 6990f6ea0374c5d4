"""What the operations of a step cost that was traced on fake tensors: seconds and scratch bytes.

In: calls without their tensors (`OpSpec`). Out: an `OpCost` for each. Begin with `timing.py`: it runs each
alone, on made-up inputs; what cannot be run, or would take too long, is estimated by a `Roofline`. A step
that really runs is timed as it runs and needs none of this (`lowtide.run.profile.costs`).
"""
