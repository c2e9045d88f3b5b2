"""vLLM's log-probs of prompts and of answers to them, for several folders one after the other.

path/to/vllm/python benchmarks/served_logprobs.py JOB.json ANSWERS.jsonl

The job is {"prompts": [[ids]], "new": tokens of an answer, "folders": {name: {"path", "dtype"}}},
where a folder may have "adapter", a PEFT folder to be served beside it, and then "modules", those
that vLLM is to prepare for one. A line is added to the answers for each folder: {"name", "prompts":
[[log-probs, from the second token on; none with an adapter]], "answers": [[ids]], "drawn":
[[log-probs]]}, or {"name", "error"}. Needs neither jax nor jaxtrain; served_families.py calls it.
"""

import gc
import json
import os
import sys
import traceback

sys.path.pop(0)  # this folder's kernels.py is not the package that transformers looks for
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def ask(folder: dict, prompts: list[list[int]], new: int) -> dict:
    """Return the log-probs of one folder's model; its answers are greedy."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    adapter, options = None, {}
    if "adapter" in folder:
        adapter = LoRARequest("adapter", 1, folder["adapter"])
        options = {"enable_lora": True, "max_lora_rank": 16, "max_loras": 2}
    if "modules" in folder:
        options["lora_target_modules"] = folder["modules"]
    llm = LLM(
        folder["path"],
        dtype=folder["dtype"],
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        **options,
    )
    # With an adapter's head vLLM 0.32 on a CPU has no log-probs of prompts: "einsum(): ..."
    prompted = None if adapter else 0
    how = SamplingParams(
        temperature=0, max_tokens=new, ignore_eos=True, logprobs=0, prompt_logprobs=prompted
    )
    texts = [{"prompt_token_ids": p} for p in prompts]
    out = llm.generate(texts, how, use_tqdm=False, lora_request=adapter)
    del llm
    return {
        "prompts": [
            [] if adapter else read(o.prompt_logprobs[1:], o.prompt_token_ids[1:]) for o in out
        ],
        "answers": [list(o.outputs[0].token_ids) for o in out],
        "drawn": [read(o.outputs[0].logprobs, o.outputs[0].token_ids) for o in out],
    }


def read(logprobs: list[dict], tokens: list[int]) -> list[float]:
    """The log-prob of each of the tokens."""
    return [logprob[token].logprob for logprob, token in zip(logprobs, tokens, strict=True)]


def main() -> int:
    with open(sys.argv[1]) as file:
        job = json.load(file)
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    for name, folder in job["folders"].items():
        try:
            line = ask(folder, job["prompts"], job["new"])
        except Exception as error:  # a folder's failure is what is asked for
            where = traceback.extract_tb(error.__traceback__)[-1]
            position = f"{os.path.basename(where.filename)}, {where.name}"
            line = {"error": f"{type(error).__name__}: {error} ({position})"}
        with open(sys.argv[2], "a") as file:
            file.write(json.dumps({"name": name, **line}) + "\n")
        gc.collect()
        cleanup_dist_env_and_memory()
    return 0


if __name__ == "__main__":
    sys.exit(main())
