"""The HTML report: one self-contained file, drawn from what runs left on disk."""

from __future__ import annotations

from tag2box.reporting.page import write_report
from tag2box.reporting.records import ProposalRecall, ReportInputs, RunRecord, read_run

__all__ = ["ProposalRecall", "ReportInputs", "RunRecord", "read_run", "write_report"]
