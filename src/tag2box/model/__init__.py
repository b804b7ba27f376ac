"""Networks: trunk, RoI maps, neck and heads."""
