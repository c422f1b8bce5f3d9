"""Reports on plans and runs: explain and compare plans, plan over all budgets, log a run, write a page."""

from baoc.tools.report.diff import Change, diff
from baoc.tools.report.explain import ReportError, find_block
from baoc.tools.report.frontier import Frontier, Point, frontier, knee
from baoc.tools.report.runlog import Run, RunLog

__all__ = ["Change", "Frontier", "Point", "ReportError", "Run", "RunLog", "diff", "find_block", "frontier", "knee"]
