"""What people see of a step and a plan.

In: a `StepGraph`, its `Plan`, and what was measured. Out: a `Report` (`make_report`); `save_report` writes it
as an HTML page, as a picture, or in the form that PyTorch's memory viewer reads. `terminal_picture` draws in
text.
"""

from lowtide.report.picture import terminal_picture
from lowtide.report.report import Measured, Report, make_report
from lowtide.report.save import ENDINGS, check_path, save_report

__all__ = [
    "ENDINGS", "Measured", "Report", "check_path", "make_report", "save_report", "terminal_picture",
]  # fmt: skip
