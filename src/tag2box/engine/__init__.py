"""Training: one batch, the loop around it, and what it leaves on disk."""
