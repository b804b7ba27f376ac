"""Import of other tools' proposal files."""
