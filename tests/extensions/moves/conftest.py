"""What the tests of moves share with those of the executor."""

from twins import everything, same, twins

__all__ = ["everything", "same", "twins"]
