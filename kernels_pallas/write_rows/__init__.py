"""Writes a pass's keys and values into one layer's cache, in place, in one launch."""
