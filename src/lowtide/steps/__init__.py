"""``lowtide trace``, ``plan`` and ``report``: one step of a preset, or of a user's own script.

`target`     ``file.py:function`` -> the function, and what runs it as ``python file.py`` would
`given`      what the function returned -> the model, its arguments, the step, the optimizer
`planning`   these -> the step graph, and the plan that `lowtide.limit_memory` would make
`commands`   the three commands
"""
