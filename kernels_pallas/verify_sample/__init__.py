"""Verification and sampling of a pass in one kernel: filters, tests and draws."""
