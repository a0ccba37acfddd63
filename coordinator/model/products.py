"""The arithmetic of one forward pass. This module imports no torch."""

from typing import Literal, NamedTuple


class Products(NamedTuple):
    """The precision of products, the temperature, and the gradient of the entropy in one forward pass."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    temperature: float = 1.0
    entropy_gradient: bool = False
