"""Plans and profiles as a person reads them: what a plan says and costs, what changed, and what a budget buys."""

from baoc.report.diff import Change, diff
from baoc.report.explain import ReportError, find_block
from baoc.report.frontier import Frontier, Point, frontier, knee

__all__ = ["Change", "Frontier", "Point", "ReportError", "diff", "find_block", "frontier", "knee"]
