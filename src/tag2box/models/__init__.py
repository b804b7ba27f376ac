"""Networks: backbones, heads, the detector, its regularizers and augmentations, and pretrained weights."""
