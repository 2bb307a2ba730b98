"""Moves the accepted nodes of a tree pass to the front, all layers in one launch."""
