"""tag2box: object detectors from image-level tags alone."""
