"""A target and its drafts trained from nothing on GSM8K, then speculative against plain decoding.

python benchmarks/draft_pair.py DATA --out benchmarks/results/draft_pair_h200
python benchmarks/draft_pair.py DATA --size tiny --budget 900   # on a CPU, to see that it works

DATA holds gsm8k_train.jsonl and gsm8k_test.jsonl (question, answer) and the folder qwen2_tokenizer.

    target      a Qwen3 of 24 layers and width 768 (282M parameters), random weights, all tokens of
                the training conversations
    answers     its own greedy answers to some training questions
    drafts      on the data's answers and its own: DFlash of 2 layers and blocks of 8, and Eagle3
                with 5 guesses
    decoding    test questions, greedily, plainly and with each draft, by number of rows

Training is the ordinary command line; every stage is a process, one after the other. Prompts have
97 to 128 tokens and answers at most 160, so that all rows have as many slots and nothing compiles
anew. Drafts are shallow because decoding one row costs launches and bytes of weights, a layer as
much in a draft as in the target.

tok/s    tokens of all answers over the median seconds of three passes, prompts included
tau      tokens for each pass of the target: mean over answers of the mean over their cycles
differ   answers whose tokens are not those of plain decoding
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

from harness import Table, command_line, log, make_parser, query_gpu, run_limited

SUFFIX = "\nPlease reason step by step, and put your final answer within \\boxed{}."
"""As the benchmark's prompts end."""
SHAPES = {
    "full": {"width": 768, "ffn": 2304, "layers": 24, "heads": 12, "kv": 4, "head": 64},
    "tiny": {"width": 32, "ffn": 64, "layers": 6, "heads": 2, "kv": 1, "head": 16},
}
READ = {
    "full": {"dflash": [1, 8, 16, 22], "eagle3": [1, 12, 22]},
    "tiny": {"dflash": [1, 2, 4, 5], "eagle3": [1, 3, 5]},
}
"""Layers of the target that the drafts read."""
DRAFTS = ("dflash", "eagle3")
RUNS = {
    "full": {
        "target": {"steps": 300, "rows": 16, "length": 1024, "rate": 2e-3},
        "dflash": {"steps": 600, "rows": 8, "length": 1024, "rate": 2e-3, "anchors": 256},
        "eagle3": {"steps": 450, "rows": 8, "length": 1024, "rate": 2e-3, "kept": 8192},
        "unroll": 5,
    },
    "tiny": {
        "target": {"steps": 4, "rows": 1, "length": 512, "rate": 3e-3},
        "dflash": {"steps": 3, "rows": 1, "length": 512, "rate": 3e-3, "anchors": 16},
        "eagle3": {"steps": 3, "rows": 1, "length": 512, "rate": 3e-3, "kept": 256},
        "unroll": 3,
    },
}
LEAST, MOST = 97, 128
"""Tokens of a prompt."""
NEW = {"full": 160, "tiny": 24}
ROWS = {"full": (1, 4, 16, 64), "tiny": (1, 2)}
WAVES = {"full": 24, "tiny": 1}
"""How often all rows answer training questions."""


def architecture(size: str) -> dict:
    """config.json of the target."""
    shape = SHAPES[size]
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": shape["width"],
        "intermediate_size": shape["ffn"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head"],
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
    }


def write_rows(source: Path, target: Path) -> None:
    """Questions in the words of the benchmark's prompts."""
    rows = map(json.loads, source.read_text().strip().split("\n"))
    lines = [json.dumps({**row, "question": row["question"] + SUFFIX}) for row in rows]
    target.write_text("\n".join(lines) + "\n")


def make_config(args, stage: str) -> dict:
    """The run of the target, or of a draft, as a config's table."""
    run, work, full = RUNS[args.size][stage], args.work, args.size == "full"
    dtype = "bfloat16" if full else "float32"
    dataset = {
        "path": str(work / "train.jsonl"),
        "fields": {"prompt": "question", "completion": "answer"},
        "format": "prompt_completion",
        "as_chat": True,
        "train_on": "all" if stage == "target" else "assistant",
    }
    datasets = [dataset]
    if stage != "target" and (work / "answers.jsonl").exists():
        answers = dataset | {"path": str(work / "answers.jsonl"), "weight": 1.0}
        datasets = [dataset | {"weight": 1.0}, answers]
    table = {
        "run": {"max_steps": run["steps"], "output_dir": str(work / stage)},
        "data": {
            "sequence_len": run["length"],
            "micro_batch_size": run["rows"],
            "num_workers": 4 if full else 0,
            "datasets": datasets,
        },
        "optim": {
            "name": "muon",
            "learning_rate": run["rate"],
            "lr_scheduler": "cosine",
            "warmup_ratio": 0.05,
            "beta1": 0.95,
            "beta2": 0.95,
        },
        "checkpoint": {"every": 10**6, "every_minutes": None},
        "log": {"every": max(1, run["steps"] // 10), "plot": False},
        "model": {"compute_dtype": dtype},
    }
    if stage == "target":
        tokenizer = str(args.data / "qwen2_tokenizer")
        table["model"] |= {"architecture": architecture(args.size), "tokenizer": tokenizer}
        return table
    table["model"] |= {"path": str(work / "target/model"), "param_dtype": dtype}
    draft: dict = {"target_layers": READ[args.size][stage]}
    table["task"] = {"kind": stage, "min_loss_tokens": 16, "draft": draft}
    if stage == "dflash":
        table["task"] |= {"block_size": 8, "num_anchors": run["anchors"], "decay": 7.0}
        draft["num_layers"] = 2
    else:
        table["task"] |= {"length": RUNS[args.size]["unroll"], "draft_vocab_size": run["kept"]}
    return table


class Decoder:
    """The target, alone and with its drafts, on one device."""

    def __init__(self, args):
        import jax

        from jaxtrain.data.chat.template import end_of_turn_ids, load_tokenizer
        from jaxtrain.distributed.mesh import make_mesh
        from jaxtrain.generation.engine import Sampling

        self.args = args
        self.tokenizer = load_tokenizer(str(args.data / "qwen2_tokenizer"), None)
        self.ends = end_of_turn_ids(self.tokenizer, False)
        self.sampling = Sampling(temperature=0.0, max_new_tokens=NEW[args.size])
        self.mesh = make_mesh(jax.devices()[:1])
        self.target = self.load("target")
        self.samplers: dict = {}

    def load(self, name: str):
        """A model as it decodes."""
        import jax

        from jaxtrain.generation.local.slots import unstack
        from jaxtrain.models import loading

        dtype = "bfloat16" if self.args.size == "full" else "float32"
        folder = self.args.work / name / "model"
        model = loading.load(folder, self.mesh, param_dtype=dtype, dtype=dtype)
        with jax.set_mesh(self.mesh):
            return unstack(model)

    def prompts(self, path: Path, most: int) -> list[tuple[str, list[int]]]:
        """(question, tokens) of the first rows of a file that have the right length."""
        from jaxtrain.data.chat.prompt import prompt_tokens

        chosen = []
        for line in path.read_text().strip().split("\n"):
            text = json.loads(line)["question"].removesuffix(SUFFIX) + SUFFIX
            ids = prompt_tokens(self.tokenizer, [{"role": "user", "content": text}], None)
            if LEAST <= len(ids) <= MOST and len(chosen) < most:
                chosen.append((text, list(ids)))
        return chosen

    def answer(self, name: str, model, prompts: list[list[int]]) -> tuple[float, list]:
        """(seconds, requests) of prompts that begin at once, a row each."""
        from jaxtrain.generation.local.sampler import LocalSampler

        key = name, len(prompts)
        if key not in self.samplers:
            options = {"max_len": 1024, "max_batch": len(prompts), "mesh": self.mesh}
            self.samplers[key] = LocalSampler(model, self.ends, **options)
        sampler = self.samplers[key]
        requests = [
            sampler.request(prompt, self.sampling, number=number)
            for number, prompt in enumerate(prompts)
        ]
        start = time.perf_counter()
        for request in requests:
            sampler.add(request)
        while sampler.busy:
            sampler.step()
        return time.perf_counter() - start, requests

    def answer_questions(self) -> None:
        """Write the target's own answers to training questions into answers.jsonl."""
        rows, out = max(ROWS[self.args.size]), []
        questions = self.prompts(self.args.work / "train.jsonl", WAVES[self.args.size] * rows)
        for start in range(0, len(questions) - rows + 1, rows):
            part = questions[start : start + rows]
            _, requests = self.answer("plain", self.target, [ids for _, ids in part])
            for (question, _), request in zip(part, requests, strict=True):
                text = self.tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
                if request.finish_reason == "stop" and text:
                    out.append(json.dumps({"question": question, "answer": text}))
        log(f"{len(out)} of {len(questions)} answers ended")
        if len(out) > rows:
            (self.args.work / "answers.jsonl").write_text("\n".join(out) + "\n")

    def time_rows(self, models: dict, prompts: list[list[int]], rows: int) -> list[dict]:
        """Return a row of the report for each way to decode; at few rows in several waves."""
        count = max(rows, 12)
        chosen = (prompts * (count // len(prompts) + 1))[:count]
        waves = [chosen[i : i + rows] for i in range(0, count, rows)]
        seconds: dict = {name: [] for name in models}
        first: dict = {}
        for turn in range(4):
            for name, model in models.items():
                parts = [self.answer(name, model, wave) for wave in waves]
                first.setdefault(name, [request for _, requests in parts for request in requests])
                if turn:  # the first compiles
                    seconds[name].append(sum(time for time, _ in parts))
        report = []
        for name, requests in first.items():
            tokens = sum(len(request.tokens) for request in requests)
            row = {"rows": rows, "by": name, "seconds": seconds[name], "answers": len(requests)}
            row |= {"tokens": tokens, "tokens_per_s": tokens / statistics.median(seconds[name])}
            if name in DRAFTS:
                row |= compare(first["plain"], requests, models[name].draft.num_drafted)
                row["speedup"] = row["tokens_per_s"] / report[0]["tokens_per_s"]
            report.append(row)
        return report


def compare(plain: list, drafted: list, num_drafted: int) -> dict:
    """Acceptance, and whether the answers are those of plain decoding."""
    means = [statistics.fmean(entry.lengths) for entry in drafted if entry.lengths]
    lengths = [length for entry in drafted for length in entry.lengths]
    largest = 0.0
    for a, b in zip(plain, drafted, strict=True):
        for x, y, p, q in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=False):
            if x != y:
                break
            largest = max(largest, abs(p - q))
    return {
        "tau": statistics.fmean(means) if means else 0.0,
        "tau_pooled": statistics.fmean(lengths) if lengths else 0.0,
        "histogram": [lengths.count(i) for i in range(1, num_drafted + 2)],
        "differ": sum(a.tokens != b.tokens for a, b in zip(plain, drafted, strict=True)),
        "largest_logprob_difference": largest,
    }


COLUMNS = (
    ("rows", "rows", ">4"),
    ("by", "by", ">8"),
    ("tok/s", "tokens_per_s", ">9,.0f"),
    ("tau", "tau", ">6.2f"),
    ("speed", "speedup", ">7.2f"),
    ("differ", "differ", ">7"),
    ("answers", "answers", ">8"),
)


def decode(args) -> None:
    """Time test questions plainly and with each draft."""
    from jaxtrain.generation.local.speculation import DraftedModel

    decoder = Decoder(args)
    models = {name: DraftedModel(decoder.target, decoder.load(name)) for name in DRAFTS}
    models = {"plain": decoder.target} | models
    prompts = [ids for _, ids in decoder.prompts(args.data / "gsm8k_test.jsonl", 64)]
    table = Table(COLUMNS, args.out, command_line(), hardware=query_gpu())
    for rows in ROWS[args.size]:
        for row in decoder.time_rows(models, prompts, rows):
            table.add(row)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path, help="folder with GSM8K and a tokenizer")
    parser.add_argument("--size", default="full", choices=[*SHAPES])
    parser.add_argument("--budget", type=float, default=900.0, help="seconds for everything")
    parser.add_argument("--work", type=Path, default=Path("runs/draft_pair"), help="a new folder")
    parser.add_argument("--stage", choices=["answers", "decode"], help="of a folder with the runs")
    args = parser.parse_args()
    if args.stage:
        return Decoder(args).answer_questions() if args.stage == "answers" else decode(args)
    args.work.mkdir(parents=True)
    write_rows(args.data / "gsm8k_train.jsonl", args.work / "train.jsonl")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(args.work / "compiled"))
    end = time.monotonic() + args.budget
    for stage in ("target", "answers", *DRAFTS, "decode"):
        command = [sys.executable, __file__, *sys.argv[1:], "--stage", stage]
        if stage in RUNS[args.size]:
            path = args.work / f"{stage}.json"
            path.write_text(json.dumps(make_config(args, stage), indent=1))
            command = [sys.executable, "-m", "jaxtrain.main", "--config", str(path)]
        output, failed = run_limited(command, max(1.0, end - time.monotonic()))
        log(f"{stage}: {failed or 'done'}\n{output}")
        if failed:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
