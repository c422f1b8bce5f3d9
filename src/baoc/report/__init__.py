"""Plans and profiles as a person reads them: what a plan says and costs, what changed, and what a budget buys."""

from baoc.report.diff import Change, diff
from baoc.report.explain import ReportError, find_block
from baoc.report.frontier import Frontier, Point, frontier, knee
from baoc.report.runlog import Run, RunLog

__all__ = ["Change", "Frontier", "Point", "ReportError", "Run", "RunLog", "diff", "find_block", "frontier", "knee"]
