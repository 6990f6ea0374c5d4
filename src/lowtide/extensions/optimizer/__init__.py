"""An optimizer that a budget counts: what its state and its own step take (`counted.py`, `need.py`)."""
