"""What a step does under a set of stored values, to the byte.

In: a `StepGraph`, the ids of the values that stay, and those that move. Out: a `Simulation`: live bytes at
every event, the peak and where it is, what runs again, and seconds. `Simulator.close` makes a wish
feasible. Begin with `simulator.py`, then `walk.py`.
"""

from lowtide.plan.simulate.simulator import Simulation, Simulator, plain

__all__ = ["Simulation", "Simulator", "plain"]
