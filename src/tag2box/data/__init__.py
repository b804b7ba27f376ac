"""Photos, tags and (for evaluation only) boxes, read from the formats people have."""
