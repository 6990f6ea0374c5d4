"""What people see: tables, pictures and pages of a step and a plan.

`make_report` puts together all that is shown of one step; `save_report` writes it as an HTML page, as a
picture, or in the form that PyTorch's memory viewer reads.
"""

from lowtide.report.formats import percent_text, seconds_text
from lowtide.report.picture import terminal_picture
from lowtide.report.report import Measured, Report, make_report
from lowtide.report.save import ENDINGS, check_ending, save_report

__all__ = [
    "ENDINGS", "Measured", "Report", "check_ending", "make_report", "percent_text", "save_report",
    "seconds_text", "terminal_picture",
]  # fmt: skip
