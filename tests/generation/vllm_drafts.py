"""Run by the Python of an environment with vLLM: answers of a target with a draft, and what vLLM
counted of its guesses, as JSON. Arguments: target, draft, method, guesses, tokens, prompts (JSON).
"""

import json
import sys

from vllm import LLM, SamplingParams


def main() -> None:
    target, draft, method, guesses, tokens, prompts = sys.argv[1:]
    engine = LLM(
        model=target,
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=1,
        disable_log_stats=False,
        enable_prefix_caching=False,
        speculative_config={
            "method": method,
            "model": draft,
            "num_speculative_tokens": int(guesses),
        },
    )
    params = SamplingParams(temperature=0.0, max_tokens=int(tokens), ignore_eos=True)
    provided = [{"prompt_token_ids": ids} for ids in json.loads(prompts)]
    answers = [list(entry.outputs[0].token_ids) for entry in engine.generate(provided, params)]
    counted = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "values", None)
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    print("FOUND " + json.dumps({"answers": answers, "counted": counted}))


if __name__ == "__main__":
    main()
