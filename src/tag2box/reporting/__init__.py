"""HTML pages about runs, datasets, proposals and studies: self-contained files, drawn from plain data."""

from tag2box.reporting.records import ProposalRecall, ReportInputs, RunRecord, read_run
from tag2box.reporting.report_page import write_report

__all__ = ["ProposalRecall", "ReportInputs", "RunRecord", "read_run", "write_report"]
