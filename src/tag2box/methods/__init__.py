"""Weakly supervised detection methods, one file per paper: formulas, settings, and the labeler, MIL head or loss term.

``tag2box.extend`` lists those that settings can name.
"""
