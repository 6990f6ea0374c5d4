"""What people see: tables and pictures of a step and a plan, in the terminal and as image files."""

from lowtide.report.formats import percent_text, seconds_text
from lowtide.report.picture import save_picture, terminal_picture

__all__ = ["percent_text", "save_picture", "seconds_text", "terminal_picture"]
