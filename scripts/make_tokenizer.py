"""Make the tokenizer that jaxtrain ships: a byte-level BPE trained on the calculator's data.

    python scripts/make_tokenizer.py [folder]      (default: jaxtrain/assets/tokenizer)

The result is the same byte for byte each time; a test compares it with what is shipped. Digits are
single tokens, so that a small model can copy numbers. The chat template keeps the prefix property:
the tokens of messages[:i] begin the tokens of messages[:i+1].
"""

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxtrain.data.sources.calculator import TOOLS, CalculatorRows

FOLDER = Path(__file__).parents[1] / "jaxtrain" / "assets" / "tokenizer"
VOCAB_SIZE = 512
NUM_ROWS = 2_000

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
]

# Words with their space, single digits, runs of signs with the line ends after them, white space.
SPLIT = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson(separators=(',', ':')) + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first and tools %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>\\n' }}
{%- endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{{- '<tool_call>' + {'name': call.name, 'arguments': call.arguments} | tojson + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>tool\\n<tool_response>' + message.content }}
{{- '</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

# Ordinary English beside the generated conversations, so that other text is not all single bytes.
PROSE = """
A small model learns to think before it acts. It reads the question, writes what it needs, calls a
tool and waits for the result. Then it gives the answer to the user in one short sentence.
The agent is not allowed to guess. If there is an error, it tries again with other arguments.
You can train this model on your own data: write the messages of each conversation as one line of
JSON, with the role and the content of every message, and name the file in the config.
Please help me with the following problem. Here is some information about it. Thank you very much.
Which of these numbers is the larger one, and why? Explain your reasoning step by step.
There were some apples in the box; she took half of them and gave the others to her friend.
How many are left? First we count how many there were, then we divide, and the rest is simple.
"""


def corpus() -> list[str]:
    """The texts that merges are learned from, without the special tokens."""
    texts = [PROSE]
    texts += ["system\n", "# Tools\n", json.dumps(TOOLS[0], separators=(",", ":"))] * NUM_ROWS
    texts += ["user\n", "assistant\n", "tool\n"] * NUM_ROWS
    for row in CalculatorRows(NUM_ROWS):
        for message in row["messages"]:
            texts += [message.get("reasoning_content") or "", message["content"]]
            for call in message.get("tool_calls", []):
                function = call["function"]
                call = {"name": function["name"], "arguments": json.loads(function["arguments"])}
                texts.append(json.dumps(call))
    return texts


def train() -> Tokenizer:
    """The tokenizer: 256 bytes, learned merges, then the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(MARKUP),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=True, normalized=False) for text in CONTROL]
        + [AddedToken(text, special=False, normalized=False) for text in MARKUP]
    )
    return tokenizer


def write(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads(train().to_str())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        text = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
        (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    write(parser.parse_args().folder)
