"""What people see: tables, pictures and pages of a step and a plan.

`make_report` puts together all that is shown of one step; `save_page` writes it as an HTML page, `save_stacked_picture`
as an image, `save_snapshot` in the form that PyTorch's memory viewer reads.
"""

from lowtide.report.formats import percent_text, seconds_text
from lowtide.report.page import save_page
from lowtide.report.picture import save_picture, terminal_picture
from lowtide.report.report import Measured, Report, make_report

__all__ = ["Measured", "Report", "make_report", "percent_text", "save_page", "save_picture", "seconds_text", "terminal_picture"]  # fmt: skip
