"""What a plan does, for people: as data, as text for a terminal, and as a page for a browser. Pure Python."""

from mindformers_core.tensor_parallel.explaining.page import page
from mindformers_core.tensor_parallel.explaining.report import Report, make_report
from mindformers_core.tensor_parallel.explaining.text import explain_plan

__all__ = ["Report", "explain_plan", "make_report", "page"]
