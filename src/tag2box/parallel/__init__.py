"""Process pools: the cores of this machine, or a Ray cluster."""
