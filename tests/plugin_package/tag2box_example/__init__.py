"""One plug-in of every kind, from outside tag2box."""
