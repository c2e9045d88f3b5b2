"""Decoding part of draft_pair.py: plainly and with each draft, compiled before there is a model.

python benchmarks/draft_decoding.py DATA --work FOLDER      # called by draft_pair.py

Compiles with random weights for each number of rows, waits for FOLDER/gate/answers.go, answers
training questions with the target alone, waits for decode.go, and times everything. Prompts have
97 to 128 tokens and answers at most 160: all rows have as many slots and nothing compiles anew.

tok/s    tokens of all answers over the median seconds of three passes, prompts included
tau      tokens for each pass of the target: mean over answers of the mean over their cycles
differ   answers whose tokens are not those of plain decoding
"""

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
from draft_pair import DRAFTS, SHAPES, SUFFIX, architecture, compute_dtype, log, make_config

from jaxtrain.config.load import validate_config
from jaxtrain.data.chat.template import end_of_turn_ids, load_tokenizer, prompt_tokens
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.requests import Request
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.methods.registry import make_task
from jaxtrain.models import build, families, loading, saving

KINDS = ("plain", *DRAFTS)
LEAST, MOST = 97, 128
"""Tokens of a prompt."""
NEW = {"full": 160, "tiny": 24}
ROWS = {"full": (1, 16, 64, 4), "tiny": (1, 2)}
WAVES = {"full": 24, "tiny": 1}
"""How often all rows answer training questions."""


class Decoder:
    """Samplers of all kinds and numbers of rows, whose models may be swapped."""

    def __init__(self, args):
        self.args, self.gate = args, args.work / "gate"
        self.tokenizer = load_tokenizer(str(args.data / "qwen2_tokenizer"), None)
        self.ends = end_of_turn_ids(self.tokenizer, False)
        self.sampling = Sampling(temperature=0.0, max_new_tokens=NEW[args.size])
        self.mesh = make_mesh(jax.devices()[:1])
        self.samplers: dict = {}
        self.test = [ids for _, ids in self.prompts(args.data / "gsm8k_test.jsonl", 64)]
        self.warmed: list[int] = []

    def prompts(self, path: Path, most: int) -> list[tuple[str, list[int]]]:
        """(question, tokens) of the first rows of a file that have the right length."""
        actual = []
        for line in path.read_text().strip().split("\n"):
            text = json.loads(line)["question"].removesuffix(SUFFIX) + SUFFIX
            ids = prompt_tokens(self.tokenizer, [{"role": "user", "content": text}], None)
            if LEAST <= len(ids) <= MOST and len(actual) < most:
                actual.append((text, list(ids)))
        return actual

    def write_random(self, folder: Path) -> None:
        """Folders of models with the shapes of those that are being trained."""
        actual = {"target": families.config_from_hf(architecture(self.args.size))}
        for kind in DRAFTS:
            table, dtype = make_config(self.args, kind), compute_dtype(self.args.size)
            table["model"] = {
                "architecture": architecture(self.args.size),
                "tokenizer": str(self.args.data / "qwen2_tokenizer"),
                "param_dtype": dtype,
                "compute_dtype": dtype,
            }
            task = make_task(validate_config(table, kind))
            actual[kind] = task.roles["draft"].bundle.architecture
        for name, config in actual.items():
            (folder / name).mkdir(parents=True)
            saving.save(build.init(config, 0), config, folder / name)

    def load(self, folder: Path):
        """A model as it decodes."""
        dtype = compute_dtype(self.args.size)
        model = loading.load(folder, self.mesh, param_dtype=dtype, dtype=dtype)
        with jax.set_mesh(self.mesh):
            return unstack(model)

    def load_all(self, folders: dict[str, Path]) -> dict:
        """Models by kind."""
        target = self.load(folders["target"])
        return {"plain": target} | {k: DraftedModel(target, self.load(folders[k])) for k in DRAFTS}

    def answer(self, kind: str, model, prompts: list[list[int]]) -> tuple[float, list[Request]]:
        """(seconds, requests) of prompts that begin at once, a row each."""
        key = kind, len(prompts)
        if key not in self.samplers:
            self.samplers[key] = LocalSampler(
                model, self.ends, max_len=1024, max_batch=len(prompts), mesh=self.mesh
            )
        sampler = self.samplers[key]
        sampler.use(model)
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

    def waves(self, rows: int) -> list[list[list[int]]]:
        """Prompts that are answered together; at few rows several waves."""
        count = 12 if rows < 12 else rows
        chosen = (self.test * (count // len(self.test) + 1))[:count]
        return [chosen[i : i + rows] for i in range(0, count, rows)]

    def warm(self, models: dict, rows: int) -> None:
        """Compile for so many rows, all kinds at once."""
        began = time.perf_counter()
        with ThreadPoolExecutor(len(KINDS)) as pool:
            list(pool.map(lambda k: self.answer(k, models[k], self.waves(rows)[0]), KINDS))
        self.warmed.append(rows)
        log(f"rows {rows}: compiled in {time.perf_counter() - began:.0f} s")

    def answer_questions(self) -> None:
        """The target's own answers to training questions, into answers.jsonl."""
        target, rows, out = self.load(self.args.work / "target/model"), max(self.warmed), []
        actual = self.prompts(self.args.work / "train.jsonl", WAVES[self.args.size] * rows)
        for start in range(0, len(actual) - rows + 1, rows):
            part = actual[start : start + rows]
            _, requests = self.answer("plain", target, [ids for _, ids in part])
            for (question, _), request in zip(part, requests, strict=True):
                text = self.tokenizer.decode(request.tokens, skip_special_tokens=True).strip()
                if request.finish_reason == "stop" and text:
                    out.append(json.dumps({"question": question, "answer": text}))
        log(f"{len(out)} of {len(actual)} answers ended")
        if len(out) > rows:
            (self.args.work / "answers.jsonl").write_text("\n".join(out) + "\n")

    def time_rows(self, models: dict, rows: int) -> dict:
        """Return one row of the report."""
        seconds: dict = {kind: [] for kind in KINDS}
        first: dict = {}
        for turn in range(4):
            for kind in KINDS:
                parts = [self.answer(kind, models[kind], wave) for wave in self.waves(rows)]
                first.setdefault(kind, [request for _, requests in parts for request in requests])
                if turn:  # the first only has new weights
                    seconds[kind].append(sum(time for time, _ in parts))
        row: dict = {"rows": rows, "answers": len(first["plain"]), "seconds": seconds}
        for kind in KINDS:
            tokens = sum(len(request.tokens) for request in first[kind])
            row[kind] = {
                "tokens": tokens,
                "tokens_per_s": tokens / statistics.median(seconds[kind]),
            }
        for kind in DRAFTS:
            row[kind] |= compare(first["plain"], first[kind], models[kind].draft.num_drafted)
            row[kind]["speedup"] = row[kind]["tokens_per_s"] / row["plain"]["tokens_per_s"]
        return row


def compare(plain: list[Request], drafted: list[Request], num_drafted: int) -> dict:
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
        "different_answers": sum(a.tokens != b.tokens for a, b in zip(plain, drafted, strict=True)),
        "largest_logprob_difference": largest,
    }


def describe(row: dict) -> str:
    """A line."""
    parts = [f"rows {row['rows']:>2}: plain {row['plain']['tokens_per_s']:,.0f} tok/s"]
    for kind in DRAFTS:
        local_value = row[kind]
        parts.append(
            f"{kind} tau {local_value['tau']:.2f}, {local_value['tokens_per_s']:,.0f} tok/s,"
            f" {local_value['speedup']:.2f}x,"
            f" {local_value['different_answers']} of {row['answers']} differ"
        )
    return "; ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--size", default="full", choices=[*SHAPES])
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    decoder, work = Decoder(args), args.work
    log(f"{len(decoder.test)} test prompts")
    decoder.write_random(work / "random")
    models = decoder.load_all({name: work / "random" / name for name in ("target", *DRAFTS)})
    todo, answered = list(ROWS[args.size]), False
    while not (decoder.gate / "decode.go").exists():
        if decoder.warmed and not answered and (decoder.gate / "answers.go").exists():
            answered = True
            decoder.answer_questions()
            (decoder.gate / "answers.done").touch()
        elif todo:
            decoder.warm(models, todo.pop(0))
        else:
            time.sleep(0.2)
    models = decoder.load_all({name: work / name / "model" for name in ("target", *DRAFTS)})
    report = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": []}
    for rows in decoder.warmed:
        report["rows"].append(decoder.time_rows(models, rows))
        log(describe(report["rows"][-1]))
        (work / "decoding.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
