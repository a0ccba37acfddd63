"""Figures of models and graphics cards, and what follows from them before anything is measured; pure.

- Shapes are those of the published config.json files. Cards: the vendors' data sheets, matrix products in bf16 (fp16
  for v100 and t4) without sparsity.
- An estimate is a roofline: the time that arithmetic or memory alone would take, divided by an efficiency. Its range is
  stated, since nothing was measured on that card.
"""

from dataclasses import dataclass
from typing import Any

from protocol.errors import ConfigInvalid

BF16_BYTES = 2

TRAIN_EFFICIENCY = (0.15, 0.40)
"""The share of a card's arithmetic that training reaches: from short, padded batches to long, packed ones."""

SAMPLE_EFFICIENCY = (0.35, 0.70)
"""The share of the roofline that an engine with paged attention reaches; ours in torch is slower."""

REPLAY_EFFICIENCY = (0.35, 0.70)
"""The share of a card's arithmetic in float32 that a replay reaches: assumed, nothing was measured on a card."""

THREAD_GFLOPS = (30.0, 70.0)
"""Billions of operations per second of a replay on each processor thread. The high end was measured (bench/RESULTS.md,
what audits cost: SmolLM2-135M, AVX-512, one and two threads); the low end is assumed for older processors."""

KV_SHARE = 0.90
"""The share of a card's memory that an engine uses."""

SEQUENCES_MAX = 256
"""The most sequences that an engine samples together."""


@dataclass(frozen=True)
class DecoderShape:
    """The numbers of a decoder's config.json from which its costs follow."""

    kind: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool

    @property
    def parameters(self) -> int:
        """Return the number of weights, with norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        norms = 2 * self.hidden + (2 * self.head_dim if self.kind == "qwen3" else 0)
        block = attention + 3 * self.hidden * self.inner + norms
        return self.layers * block + self.hidden * (1 + self.vocabulary * (1 if self.tied else 2))

    @property
    def size_bytes(self) -> int:
        """Return the size of the weights in bf16."""
        return BF16_BYTES * self.parameters

    @property
    def products(self) -> int:
        """Return the weights that each token is multiplied with: all but the table of embeddings."""
        return self.parameters - (0 if self.tied else self.hidden * self.vocabulary)

    @property
    def kv_bytes(self) -> int:
        """Return the size of a token's keys and values."""
        return 2 * BF16_BYTES * self.layers * self.kv_heads * self.head_dim

    def to_config(self) -> dict[str, Any]:
        """Return the content of a config.json of this shape."""
        return {
            "model_type": self.kind,
            "architectures": ["Qwen3ForCausalLM" if self.kind == "qwen3" else "LlamaForCausalLM"],
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": 32768,
        }

    @staticmethod
    def from_config(config: dict[str, Any]) -> "DecoderShape":
        """Return the shape that a config.json describes."""
        try:
            heads = int(config["num_attention_heads"])
            return DecoderShape(
                kind=str(config["model_type"]),
                hidden=int(config["hidden_size"]),
                layers=int(config["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(config.get("num_key_value_heads") or heads),
                head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
                inner=int(config["intermediate_size"]),
                vocabulary=int(config["vocab_size"]),
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigInvalid(
                f"The config.json describes no dense decoder: {error!r}.",
                hint="Measure one update and one group instead: `plan --train-s --group-s`.",
            ) from error


@dataclass(frozen=True)
class CardSpeed:
    """The speed of a graphics card by its data sheet."""

    tflops: float
    gb_per_s: float


def _qwen3(hidden: int, layers: int, heads: int, inner: int, *, tied: bool) -> DecoderShape:
    return DecoderShape("qwen3", hidden, layers, heads, 8, 128, inner, 151_936, tied)


MODELS = {
    "qwen/qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen/qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen/qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen/qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen/qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen/qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "huggingfacetb/smollm2-135m": DecoderShape("llama", 576, 30, 9, 3, 64, 1536, 49_152, tied=True),
    "huggingfacetb/smollm2-360m": DecoderShape("llama", 960, 32, 15, 5, 64, 2560, 49_152, tied=True),
    "huggingfacetb/smollm2-1.7b": DecoderShape("llama", 2048, 24, 32, 32, 64, 8192, 49_152, tied=True),
    "meta-llama/llama-3.2-1b": DecoderShape("llama", 2048, 16, 32, 8, 64, 8192, 128_256, tied=True),
    "meta-llama/llama-3.2-3b": DecoderShape("llama", 3072, 28, 24, 8, 128, 8192, 128_256, tied=True),
    "meta-llama/llama-3.1-8b": DecoderShape("llama", 4096, 32, 32, 8, 128, 14336, 128_256, tied=False),
    "meta-llama/llama-3.3-70b": DecoderShape("llama", 8192, 80, 64, 8, 128, 28672, 128_256, tied=False),
}
"""Shapes by the name on the hub, in lower case; `-Instruct` and the like have the same shape."""

SPEEDS = {
    "h200": CardSpeed(989, 4800), "h100": CardSpeed(989, 3350), "h100-94": CardSpeed(835, 3938),
    "h20": CardSpeed(148, 4000), "b200": CardSpeed(2250, 8000), "a100": CardSpeed(312, 2039),
    "a100-80": CardSpeed(312, 2039), "a100-40": CardSpeed(312, 1555), "a6000": CardSpeed(155, 768),
    "a40": CardSpeed(150, 696), "a10": CardSpeed(125, 600), "l40s": CardSpeed(362, 864),
    "l40": CardSpeed(181, 864), "l4": CardSpeed(121, 300), "t4": CardSpeed(65, 320),
    "v100": CardSpeed(125, 900), "5090": CardSpeed(209, 1792), "5080": CardSpeed(113, 960),
    "4090": CardSpeed(165, 1008), "4080": CardSpeed(97, 717), "3090": CardSpeed(71, 936),
    "rtx6000ada": CardSpeed(364, 960), "rtxpro6000": CardSpeed(504, 1792), "mi250": CardSpeed(181, 1638),
    "mi300x": CardSpeed(1307, 5300), "mi325x": CardSpeed(1307, 6000),
}  # fmt: skip
"""Dense TFLOP/s of matrix products, and GB/s of memory."""


FLOAT32_TFLOPS = {
    "h200": 67, "h100": 67, "h100-94": 60, "h20": 44, "b200": 75, "a100": 19.5, "a100-80": 19.5, "a100-40": 19.5,
    "a6000": 38.7, "a40": 37.4, "a10": 31.2, "l40s": 91.6, "l40": 90.5, "l4": 30.3, "t4": 8.1, "v100": 15.7,
    "5090": 104.8, "5080": 56.3, "4090": 82.6, "4080": 48.7, "3090": 35.6, "rtx6000ada": 91.1, "rtxpro6000": 125,
    "mi250": 22.6, "mi300x": 163.4, "mi325x": 163.4,
}  # fmt: skip
"""TFLOP/s in full float32, without tensor cores: auditors compute so."""


def find_shape(name: str) -> DecoderShape:
    """Return the shape of a model of the table; raise an error that lists them."""
    wanted = name.lower().removeprefix("hf://")
    close = [known for known in MODELS if wanted in (known, known.partition("/")[2]) or wanted.startswith(f"{known}-")]
    if not close:
        raise ConfigInvalid(
            f"The shape of model {name} is not known.",
            hint=f"Give a folder with its config.json, or one of {', '.join(MODELS)}.",
        )
    return MODELS[max(close, key=len)]


def find_speed(card: str) -> CardSpeed:
    """Return the speed of a card of the table; raise an error that lists them."""
    if card not in SPEEDS:
        raise ConfigInvalid(f"The speed of card {card} is not known.", hint=f"Cards: {', '.join(sorted(SPEEDS))}.")
    return SPEEDS[card]


def train_flops(shape: DecoderShape, tokens: float, length: float, passes: float) -> float:
    """Return the operations of training on `tokens`, in samples of `length`; `passes` counts forward passes."""
    attention = 2 * shape.layers * shape.heads * shape.head_dim * length
    return 2 * passes * tokens * (shape.products + attention / 2)


def replay_flops(shape: DecoderShape, prompt: float, completion: float, samples: int) -> float:
    """Return the operations of one replay of a group: its prompt once, and each sample after it."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim
    read = prompt * prompt / 2 + samples * completion * (prompt + completion / 2)
    return 2 * shape.products * (prompt + samples * completion) + attention * read


def sequences_at_once(shape: DecoderShape, memory_bytes: float, length: float) -> int:
    """Return how many sequences of `length` fit beside the weights; 0 if the weights alone do not fit."""
    left = KV_SHARE * memory_bytes - shape.size_bytes
    return max(0, min(SEQUENCES_MAX, int(left / (shape.kv_bytes * length))))


def sampled_per_s(shape: DecoderShape, speed: CardSpeed, sequences: int, length: float) -> float:
    """Return the roofline of sampling, in tokens per second: a step reads all weights and keys, and multiplies."""
    read_s = (shape.size_bytes + sequences * shape.kv_bytes * length / 2) / (speed.gb_per_s * 1e9)
    multiply_s = 2 * shape.products * sequences / (speed.tflops * 1e12)
    return sequences / max(read_s, multiply_s)
