"""Shares the helpers of the decode tests."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent.parent / "decode"))
