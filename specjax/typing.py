"""Array aliases and axis letters, defined once.

Axis letters used in annotations everywhere:

    B batch rows        T new tokens of a pass    G gamma, draft tokens
    N tree nodes        L token buffer            S cache slots
    V vocabulary        D model width             F feed-forward width
    H query heads       K key/value heads         M head width
    R rows addressed by a call (R <= B)
"""

from typing import Any

import jax
from jaxtyping import Bool, Float, Int, UInt

Array = jax.Array

#: A pytree of parameters: nested dictionaries with string keys.
Params = dict[str, Any]

__all__ = ["Array", "Bool", "Float", "Int", "Params", "UInt"]
