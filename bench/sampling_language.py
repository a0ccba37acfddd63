"""Inverse CDF against Gumbel-max on a language model's own distributions, and with Gumbel's noise in one pass.

- SmolLM2 reads this repository's README in float32 and in bf16, with its head in float32, as the engine has it.
  "Rounded" are the float32 logits in bf16.
- Its vocabulary is widened to `VOCABULARY` by copies of each row of logits, `LESS_NATS` lower.
- Costs are processor time of one thread, from logits to tokens, in turns. "In pieces" is one pass over the vocabulary,
  in pieces that stay in a core's cache. Its noise is float32 from 32 bits, a lower bound on the cost: a definition
  could not use it, since large noise has too few values.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from bench.harness import ROOT, Bench, no_options, quick_from_environment
from bench.sampling import gumbel_max, inverse_cdf
from protocol.work.sampling import uniform_table
from swarm_exact.drawing import draw

SMOLLM2 = ROOT / ".venv-real" / "smollm2"
VOCABULARY = 151_936
LESS_NATS = 6.0
LENGTH, ROWS, PIECE = 64, 16, 2**14


def light_gumbel(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw from 32-bit noise, in pieces of the vocabulary: [N, V], [N] → [N]."""
    keys = (uniforms * 2.0**31).int()[:, None]
    tops, tokens = [], []
    for start in range(0, logits.shape[1], PIECE):
        part = logits[:, start : start + PIECE]
        words = torch.arange(start, start + part.shape[1], dtype=torch.int32) * -1640531527 + keys
        for shift, factor in ((16, -2048144789), (13, -1028477387)):
            words.bitwise_xor_((words >> shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(factor)
        noise = (words >> 8).bitwise_and_((1 << 24) - 1).float().add_(0.5).mul_(2.0**-24).log_().neg_().log_()
        top, token = (part - noise).max(-1)
        tops.append(top)
        tokens.append(token + start)
    best = torch.stack(tops).argmax(0, keepdim=True)
    return torch.stack(tokens).gather(0, best)[0]


def drawn(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw as the engine does, log-probabilities included."""
    return draw(logits, torch.ones(len(logits)), uniforms)[0]


def states(folder: Path, texts: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the states after each token [n, hidden], and the head [V, hidden], in float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    hidden = model.model(texts).last_hidden_state.flatten(0, 1).float()
    return hidden, model.lm_head.weight.float()


def widened(logits: torch.Tensor) -> torch.Tensor:
    """Return logits of a larger vocabulary: [n, V] → [n, VOCABULARY]."""
    copies = -(-VOCABULARY // logits.shape[1]) - 1
    return torch.cat((logits, *[logits.flip(-1) - LESS_NATS] * copies), dim=-1)[:, :VOCABULARY].contiguous()


@torch.no_grad()
def main() -> int:
    """Measure, print and judge."""
    no_options(__doc__)
    quick = quick_from_environment()
    torch.set_num_threads(1)
    count, rounds = (4, 3) if quick else (16, 7)
    bench = Bench("sampling_language", inputs={"positions": count * LENGTH, "rounds": rounds}, quick=quick)
    text = (ROOT / "README.md").read_text()
    tokens = Tokenizer.from_file(str(SMOLLM2 / "tokenizer.json")).encode(text).ids[: count * LENGTH]
    texts = torch.tensor(tokens).view(count, LENGTH)
    (exact, head), (rough, _) = (states(SMOLLM2, texts, dtype) for dtype in (torch.float32, torch.bfloat16))
    uniforms = torch.from_numpy(uniform_table([1] * len(exact), list(range(len(exact))), 1)[:, 0])
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
        "inverse CDF": inverse_cdf, "inverse CDF, the engine's": drawn, "Gumbel": gumbel_max,
        "Gumbel of 32 bits, in pieces": light_gumbel,
    }  # fmt: skip  # two in a line
    changes = dict[str, int]()
    for start in range(0, len(exact), ROWS):
        at = slice(start, start + ROWS)
        right, other = (widened(part[at] @ head.T) for part in (exact, rough))
        scores = torch.log_softmax(right, -1)
        for value in (-(scores.exp() * scores).sum(-1)).tolist():
            bench.measure("entropy", value, unit="nats")
        for noise, changed in (("bf16", other), ("rounded", right.bfloat16().float())):
            for way in ("inverse CDF", "Gumbel"):
                case = f"{noise}, {way}: tokens changed"
                differ = ways[way](right, uniforms[at]) != ways[way](changed, uniforms[at])
                changes[case] = changes.get(case, 0) + int(differ.sum())
    for case, changed_tokens in changes.items():
        bench.measure(case, 100 * changed_tokens / len(exact), unit="%")
    few, chances = widened(exact[:ROWS] @ head.T), uniforms[:ROWS]
    for _ in range(rounds):
        for name, pick in ways.items():
            began = time.process_time()
            pick(few, chances)
            bench.measure(name, 1e6 * (time.process_time() - began) / ROWS, unit="µs/token")
    for name in ways:
        bench.ratio(f"{name} ÷ the engine's", name, "inverse CDF, the engine's")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
