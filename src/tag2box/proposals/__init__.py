"""Candidate boxes: made here, and kept in a store."""
