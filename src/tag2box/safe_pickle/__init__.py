"""Safe reading of pickles: numpy arrays and plain values come out, and nothing in the file can run.

A pickle is a program for a stack machine that can import and call anything. Python's own machine is not used here. The
one in ``unpickler`` has no instruction that imports or calls: a name in the file stays a name, and only the names
listed in ``builders`` build anything, from checked arguments.
"""

from tag2box.safe_pickle.unpickler import read_pickle

__all__ = ["read_pickle"]
