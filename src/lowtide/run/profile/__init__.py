"""Write a step down while it runs for real within its budget: profile it.

In: a model's forward and its arguments, or a function that ends in a loss. Out: a `StepGraph`. Begin with
`profiler.py`: what replays plainly it leaves to C++ (`run/record/cpp/listen.h`), and runs the rest; both
write to the lists of one `Tracer` (`lowtide.trace.tracer`). `saved.py` is the step's tape and what autograd
holds of it, `costs.py` measures, `aside.py` profiles a step of lowtide's own, and `trace_step.py` is
`lowtide.trace`.
"""
