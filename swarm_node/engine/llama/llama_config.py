"""A policy's config.json as llama.cpp needs it: numbers by all their names, rotary positions, attention windows.

- A number that is neither in the file nor among the defaults of its architecture is not guessed: the policy is refused.
- `require` checks settings that llama.cpp computes in one fixed way.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.errors import EngineFailed
from protocol.policy.model_config import POSITIONS

LAYERS_MAX = 512
"""The bound `LLAMA_MAX_LAYERS` of llama.cpp."""

SLIDING = "sliding_attention"


class LlamaConfig:
    """The values of one configuration."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, shares_keys: bool = True) -> None:
        self._shares_keys = shares_keys
        self._values = {**defaults, **values}
        self.kind = str(values.get("model_type", ""))

    def refusal(self, reason: str) -> EngineFailed:
        """Return the error for a policy that this engine does not support."""
        return EngineFailed(
            f"The llama engine does not support this policy ({self.kind}): {reason}.",
            hint="Start the node with `--engine torch`.",
        )

    def value(self, *names: str) -> Any:
        """Return the value of the first of `names` that has one, or None."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def whole(self, *names: str) -> int:
        """Return a positive integer."""
        value = self.value(*names)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(f"config.json gives {value!r} as {names[0]}")
        return value

    def number(self, *names: str) -> float:
        """Return a finite number."""
        value = self.value(*names)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise self.refusal(f"config.json gives {value!r} as {names[0]}")
        return float(value)

    def require(self, name: str, *allowed: object) -> None:
        """Refuse a value that llama.cpp does not support."""
        value = self._values.get(name)
        if value not in allowed:
            raise self.refusal(f"llama.cpp computes it with {name} {allowed[0]!r}, and config.json says {value!r}")

    @property
    def hidden(self) -> int:
        return self.whole("hidden_size", "n_embd", "d_model")

    @property
    def layers(self) -> int:
        count = self.whole("num_hidden_layers", "n_layer", "n_layers")
        if count > LAYERS_MAX:
            raise self.refusal(f"llama.cpp has at most {LAYERS_MAX} layers, and config.json promises {count}")
        return count

    @property
    def heads(self) -> int:
        return self.whole("num_attention_heads", "n_head", "n_heads")

    @property
    def kv_heads(self) -> int:
        names = ("num_key_value_heads", "num_kv_heads")
        return self.heads if not self._shares_keys or self.value(*names) is None else self.whole(*names)

    @property
    def head(self) -> int:
        return self.hidden // self.heads if self.value("head_dim") is None else self.whole("head_dim")

    @property
    def vocabulary(self) -> int:
        return self.whole("vocab_size")

    @property
    def positions(self) -> int:
        return self.whole(*POSITIONS)

    @property
    def tied(self) -> bool:
        return bool(self._values.get("tie_word_embeddings", False))

    @property
    def windows(self) -> list[bool]:
        """Return for each layer whether it attends only to a window of the text."""
        if self.value("sliding_window") is None or self._values.get("use_sliding_window") is False:
            return [False] * self.layers
        types = self._values.get("layer_types")
        return [kind == SLIDING for kind in types] if types else [True] * self.layers

    @property
    def is_windowed(self) -> bool:
        """Return True if a text can be longer than the window of a layer."""
        return any(self.windows) and self.whole("sliding_window") < self.positions

    def rope(self, layers: str = "full_attention") -> dict[str, Any]:
        """Return the rotary settings of config.json; the old form takes precedence, as in transformers."""
        settings = self.value("rope_scaling") or self.value("rope_parameters") or {}
        chosen = settings.get(layers, {} if _by_layers(settings) else settings)
        return dict(chosen) if isinstance(chosen, Mapping) else {}

    def rope_base(self) -> float:
        """Return the base of rotary positions."""
        value = self.rope().get("rope_theta", self.value("rope_theta", "rotary_emb_base"))
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.refusal(f"config.json gives {value!r} as rope_theta")
        return float(value)

    def rotated(self) -> int:
        """Return the number of values of a head that are rotated."""
        share = self.rope().get("partial_rotary_factor", self.value("partial_rotary_factor", "rotary_pct"))
        return self.head if share is None else int(self.head * float(share))


def _by_layers(settings: Mapping[str, Any]) -> bool:
    return any(isinstance(value, Mapping) for value in settings.values())


def llama3_factors(config: LlamaConfig) -> NDArray[np.float32]:
    """Return the divisors of the frequencies of `llama3` positions."""
    rope, size = config.rope(), config.rotated()
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    length = float(rope["original_max_position_embeddings"])
    waves = 2 * math.pi * config.rope_base() ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
