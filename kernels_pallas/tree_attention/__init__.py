"""Attention of a pass's rows, a chain or a tree, over a length-bounded cache."""
