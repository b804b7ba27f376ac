"""Networks: backbones, heads, the detector, and their pretrained weights."""
