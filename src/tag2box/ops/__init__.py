"""Pure functions on tensors: boxes, NMS, RoI pooling, MIL and refinement losses, superpixel statistics."""
