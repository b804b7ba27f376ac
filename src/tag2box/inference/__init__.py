"""Inference with a trained detector."""
