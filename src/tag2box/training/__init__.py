"""Training: criterion, step, loop, and what a run writes to disk."""
