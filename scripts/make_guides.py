"""The page docs/guides.md: for each of the usual model families a config that works, and what to
know about it.

python scripts/make_guides.py

tests/docs/test_docs_guides.py runs each command with --dry-run on a tiny model of the family.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "guides.md"


class Guide(NamedTuple):
    """A start with one family."""

    title: str
    family: str
    """model_type."""
    model: str
    """On the Hub."""
    config: str
    """That comes with jaxtrain."""
    keys: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


EXPERTS = (
    "Adapters of experts are kept small by `adapter.rank_pattern` ([adapters.md](adapters.md));"
    " `parallel.expert` splits experts over devices ([experts.md](experts.md)).",
)
GATED = ("The folder is gated: accept its license on the Hub, and log in with `hf auth login`.",)
GUIDES = (
    Guide("Llama 3", "llama", "meta-llama/Llama-3.1-8B-Instruct", "lora_qwen3", notes=GATED),
    Guide(
        "Qwen3",
        "qwen3",
        "Qwen/Qwen3-8B",
        "lora_qwen3",
        ("model.chat_template_kwargs.enable_thinking=false",),
        (
            "The key asks for answers without thoughts; leave it out if your rows have some.",
            "The template leaves thoughts out of the history. A conversation with several becomes a"
            " tree, in which every turn trains ([data.md](data.md)).",
        ),
    ),
    Guide("Qwen3 with experts", "qwen3_moe", "Qwen/Qwen3-30B-A3B", "qlora_qwen3_moe", (), EXPERTS),
    Guide(
        "Qwen3.5",
        "qwen3_5",
        "Qwen/Qwen3.5-0.8B",
        "sft_qwen3",
        ("model.mtp.train=decoupled",),
        (
            "Three of four layers are gated delta layers ([hybrid.md](hybrid.md)).",
            "The key trains its head for the token after the next one"
            " ([speculative.md](speculative.md#multi-token-prediction-heads)).",
            "Rows with images train, too ([vision.md](vision.md)).",
        ),
    ),
    Guide("Mistral", "mistral", "mistralai/Mistral-7B-Instruct-v0.3", "lora_qwen3"),
    Guide("Gemma 3", "gemma3_text", "google/gemma-3-1b-it", "lora_qwen3", notes=GATED),
    Guide("Phi-4", "phi3", "microsoft/Phi-4-mini-instruct", "lora_qwen3"),
    Guide("OLMo 3", "olmo3", "allenai/Olmo-3-7B-Instruct", "lora_qwen3"),
    Guide("SmolLM3", "smollm3", "HuggingFaceTB/SmolLM3-3B", "sft_qwen3"),
    Guide("Granite 3", "granite", "ibm-granite/granite-3.3-8b-instruct", "lora_qwen3"),
    Guide("LFM2", "lfm2", "LiquidAI/LFM2-1.2B", "sft_qwen3"),
    Guide("GLM-4.5", "glm4_moe", "zai-org/GLM-4.5-Air", "qlora_qwen3_moe", (), EXPERTS),
    Guide(
        "gpt-oss",
        "gpt_oss",
        "openai/gpt-oss-20b",
        "lora_gpt_oss",
        (),
        ("Experts stay in the four bits that are published ([adapters.md](adapters.md)).",),
    ),
    Guide(
        "DeepSeek-V2",
        "deepseek_v2",
        "deepseek-ai/DeepSeek-V2-Lite-Chat",
        "qlora_qwen3_moe",
        (),
        ("Attention is latent ([latent_attention.md](latent_attention.md)).", *EXPERTS),
    ),
)


def write_command(guide: Guide) -> str:
    """Return the command of a guide."""
    words = [f"jaxtrain --config configs/{guide.config}.toml", f"model.path={guide.model}"]
    return " ".join([*words, *guide.keys])


def render_page() -> str:
    """Return the page."""
    lines = [
        "# Guides by model family",
        "",
        "This page is for people who begin with a certain model. It is generated:",
        "`python scripts/make_guides.py`. Every command takes rows of chats in `train.jsonl`, one"
        " conversation a line. Add `--dry-run` first:",
        "it reads some rows, prints a sample with its trained tokens and the memory that a device"
        " needs, and allocates nothing. `--on h200:8` estimates for",
        "devices that are not here. A test runs each command so on a tiny model of the family"
        " (`tests/docs/test_docs_guides.py`).",
        "[models.md](models.md) lists all families and what is tested of each.",
        "",
        "| family | `model_type` | starts from |",
        "|---|---|---|",
    ]
    lines += [f"| {g.title} | `{g.family}` | `configs/{g.config}.toml` |" for g in GUIDES]
    lines += [
        "",
        "Other methods take the same two words: `jaxtrain --config preference_qwen3"
        " model.path=MODEL` for DPO, `rl_math_m2po` for reinforcement learning.",
    ]
    for guide in GUIDES:
        lines += ["", f"## {guide.title}", "", "```sh {network}", write_command(guide), "```"]
        lines += ["", *(f"- {note}" for note in guide.notes)] if guide.notes else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page())
