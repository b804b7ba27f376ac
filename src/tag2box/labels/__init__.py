"""Label sets: boxes for tagged photos, the rule that chooses them, and the folder that keeps them."""
