"""The HTML report: one self-contained file, drawn from what runs left on disk."""
