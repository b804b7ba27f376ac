"""Dataset and annotation formats, in and out."""
