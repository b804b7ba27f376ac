"""Metrics of detections against ground truth. Training never imports this package."""
