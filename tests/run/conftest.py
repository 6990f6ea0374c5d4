"""What the tests of the executor share."""

from twins import everything, nothing_left, same, twins

__all__ = ["everything", "nothing_left", "same", "twins"]
