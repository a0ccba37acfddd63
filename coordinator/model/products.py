"""The arithmetic of one forward pass. No torch here."""

from typing import Literal, NamedTuple


class Products(NamedTuple):
    """How log-probabilities are computed: the precision of products, the temperature, and if entropy has a gradient."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    temperature: float = 1.0
    entropy_gradient: bool = False
