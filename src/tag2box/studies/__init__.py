"""Studies: runs queued over settings, datasets and seeds, kept by what they depend on, and told on one page."""
