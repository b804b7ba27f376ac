"""The HTML report: one self-contained file, drawn from what runs left on disk."""

from __future__ import annotations

from tag2box.reporting.data import ProposalRecall, ReportInputs, RunRecord, read_run
from tag2box.reporting.page import write_report

__all__ = ["ProposalRecall", "ReportInputs", "RunRecord", "read_run", "write_report"]
