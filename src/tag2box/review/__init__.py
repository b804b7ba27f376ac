"""The review page: a local web page on which people correct the boxes of a label set."""
