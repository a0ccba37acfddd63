"""The rival of bench-vllm, run under vLLM's interpreter: `LLM.generate` with vLLM's own sampler.

Prints "ready"; then reads lines of JSON, [[prompt, tokens], …], and prints how many tokens it has sampled for each.
"""

import json
import os
import sys


def main(folder: str) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's libraries greet on standard output
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    # On a CPU what our side has; on a GPU it leaves memory for our side, which takes what is free.
    on_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    settings = on_cpu if current_platform.is_cpu() else {"gpu_memory_utilization": 0.4}
    model = LLM(model=folder, dtype="float32", skip_tokenizer_init=True, max_num_seqs=256, seed=0, **settings)
    print(json.dumps("ready"), file=out, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        parameters = [
            SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
            for _, tokens in work
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        outputs = model.generate(prompts, parameters, use_tqdm=False)
        print(json.dumps(sum(len(output.outputs[0].token_ids) for output in outputs)), file=out, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
