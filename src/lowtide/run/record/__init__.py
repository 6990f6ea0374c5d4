"""Record operations as they run, evict what autograd saves, and replay it in backward.

In: a plan's program, a governor that holds a budget, or a scope's rule. Out: the same bits from backward. The
executor is C++ (`cpp/`; `cpp/recorder.cpp` lists its files). It takes each operation that replays plainly;
Python takes all others, on the same tape: random numbers, writes to what the tape does not know, moves,
collectives, subclasses, scopes, verified steps. Begin with `recorder.py` (one step), then `tape.py` (how
Python records) and `special.py` (what makes a replay more than the same call). `handles.py` has saved tensors
that are not plain, `engine.py` and `values.py` what C++ asks of Python.
"""
