"""Share of a layer's experts that the tokens of a batch are routed to.

Router and embeddings have random weights, the tokens are those of real texts.

    python benchmarks/routed_experts.py gsm8k_train.jsonl TOKENIZER
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

WIDTH, SAMPLES = 256, 5
LAYERS = ((32, 4), (128, 8), (256, 8), (512, 10))
"""(experts, chosen for each token), such as Qwen3-30B-A3B's 128 and 8."""
TOKENS = (8, 64, 512, 2048, 8192)


def measure_share(ids: np.ndarray, experts: int, chosen: int, tokens: int) -> float:
    """Return the mean share over samples of so many tokens in a row."""
    rng = np.random.default_rng(0)
    embedding = rng.normal(size=(int(ids.max()) + 1, WIDTH)).astype(np.float32)
    router = rng.normal(size=(WIDTH, experts)).astype(np.float32)
    samples = ids[: SAMPLES * tokens].reshape(SAMPLES, tokens)
    routed = (np.argpartition(-(embedding[s] @ router), chosen)[:, :chosen] for s in samples)
    return float(np.mean([len(np.unique(top)) / experts for top in routed]))


def main() -> None:
    """Print a line for each kind of layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="jsonl with question and answer")
    parser.add_argument("tokenizer", type=Path, help="folder with tokenizer.json")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    lines = filter(None, args.rows.read_text().split("\n"))
    rows = itertools.islice(map(json.loads, lines), 1000)
    texts = [f"{row['question']}\n{row['answer']}" for row in rows]
    ids = np.concatenate([encoded.ids for encoded in tokenizer.encode_batch(texts)])
    print("experts, chosen | " + " | ".join(f"{count:,} tokens" for count in TOKENS))
    for layer in LAYERS:
        shares = (f"{measure_share(ids, *layer, count):.1%}" for count in TOKENS)
        print(f"{layer} | " + " | ".join(shares))


if __name__ == "__main__":
    main()
