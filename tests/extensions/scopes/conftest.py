"""What the tests of scopes share with those of the executor."""

from twins import everything, nothing_left, same, twins

__all__ = ["everything", "nothing_left", "same", "twins"]
