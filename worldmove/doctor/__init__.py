"""`worldmove doctor`: what this machine can do, what is in the way, and what to do about it."""

from __future__ import annotations

from worldmove.doctor.finding import Finding
from worldmove.doctor.gpu import GPU_CHECKS, Machine
from worldmove.doctor.report import Report, examine, run
from worldmove.doctor.table import CHECKS, Check

__all__ = ["CHECKS", "GPU_CHECKS", "Check", "Finding", "Machine", "Report", "examine", "run"]
