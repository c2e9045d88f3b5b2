"""The table of docs/models.md: what each built-in family can do, from the code and from its tests.

python scripts/make_models_table.py          # writes it
python scripts/make_models_table.py --check  # says whether it is up to date

A family is in it once tests/models/families_*.py have a tiny config of it. What the first columns
say is asked of the model of that config; devices are the meshes on which test_models_families.py
and the tests named below compare it with one device; vLLM's classes are those of its registry,
which a test with a real server checks; what its log-probs were is in files that
benchmarks/served_families.py and served_families.py --adapter all-linear write.
"""

import argparse
import importlib
import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests" / "models")]

PAGE, BEGIN, END = ROOT / "docs" / "models.md", "<!-- models -->", "<!-- end -->"
ELSEWHERE = {  # test_models_build.py, _experts.py, _hybrid.py, _mamba.py
    "qwen3": {"fsdp", "tensor", "context"},
    "qwen3_moe": {"fsdp", "tensor", "context", "expert"},
    "qwen3_5": {"fsdp", "tensor", "context"},
    "nemotron_h": {"fsdp", "tensor"},
    "granitemoehybrid": {"fsdp", "tensor"},
}
"""Axes that other tests than those of all families have compared with one device."""
SERVED = ROOT / "benchmarks" / "results" / "served_families_cpu.json"
ADAPTED = ROOT / "benchmarks" / "results" / "served_adapters_cpu.json"
CLOSE = {"float32": 1e-2, "bfloat16": 0.5}
"""What rounding makes of log-probs there; another weight or position gives more."""
UNASKED = {
    *("ApertusForCausalLM", "ArceeForCausalLM", "Cohere2ForCausalLM"),
    *("Cohere2MoeForCausalLM", "CohereForCausalLM", "Llama4ForCausalLM"),
    *("Llama4ForConditionalGeneration", "MiMoV2FlashForCausalLM"),
    *("CwmForCausalLM", "ExaoneMoeForCausalLM", "FalconForCausalLM", "FlexOlmoForCausalLM"),
    *("FlintForCausalLM", "GPTNeoXForCausalLM", "GemmaForCausalLM", "GlmForCausalLM"),
    *("GraniteMoeSWAForCausalLM", "GraniteSWAForCausalLM", "HYV3ForCausalLM", "HeliumForCausalLM"),
    *("HyperCLOVAXForCausalLM", "Jais2ForCausalLM", "Lfm2ForCausalLM", "Lfm3ForCausalLM"),
    *("CodeGenForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTJForCausalLM"),
    *("GPTNeoForCausalLM", "OPTForCausalLM", "PhiForCausalLM", "PhimoeForCausalLM"),
    *("MellumForCausalLM", "MiniCPM3ForCausalLM", "MinistralForCausalLM", "NanoChatForCausalLM"),
    *(
        "NemotronForCausalLM",
        "OlmoForCausalLM",
        "OlmoHybridForCausalLM",
        "PersimmonForCausalLM",
        "StableLmForCausalLM",
    ),
    *("Starcoder2ForCausalLM", "VaultGemmaForCausalLM", "YoutuForCausalLM"),
}
"""Architectures that nobody has looked up in vLLM's registry."""
NOT_IN_VLLM = {
    *("BambaForCausalLM", "Dots1ForCausalLM", "Mistral4ForCausalLM", "SolarOpenForCausalLM"),
}
"""Architectures that vLLM 0.32's registry has no class for."""


def tiny_configs() -> dict[str, tuple[str, dict]]:
    """{name: (its file of tests, tiny config.json)}."""
    from tiny_models import SIZES

    configs = {}
    for path in sorted((ROOT / "tests" / "models").glob("families_*.py")):
        module = importlib.import_module(path.stem)
        for name, raw in module.FAMILIES.items():
            sizes = {k: v for k, v in {**SIZES, **raw}.items() if v is not None}
            configs[name] = (path.stem, sizes)
    return configs


def meshes_of(name: str, file: str) -> set[str]:
    """The axes that the family's tests shard it over."""
    sharded = getattr(importlib.import_module(file), "SHARDED", {}).get(name, [])
    return {axis for sizes in sharded for axis in sizes}


def make_rows() -> list[str]:
    """A line for each family, in alphabetical order."""

    from jaxtrain.adapters.spec import find_linears
    from jaxtrain.models import ARCHITECTURES, TEXTS, build, families

    rows: dict[str, dict] = {}
    for name, (file, raw) in tiny_configs().items():
        config = families.config_from_hf(raw)
        model = build.abstract(config)
        module = type(config).__module__.rpartition(".")[2]
        row = rows.setdefault(module, {"trees": True, "drafts": True, "axes": set(), "names": []})
        row["names"].append(name)
        mixers = [mixer for _, mixer in model.stack.mixers()]
        row["trees"] &= model.follows_trees
        row["drafts"] &= all(mixer.trials != "none" for mixer in mixers)
        assert find_linears(config), f"{name}: nothing for an adapter to stand beside"
        row["experts"] = row.get("experts", False) or config.experts_per_token is not None
        row["axes"] |= meshes_of(name, file) | ELSEWHERE.get(module, set())
    lines, served = [], json.loads(SERVED.read_text())
    adapted = json.loads(ADAPTED.read_text())["all-linear"]
    for module, row in sorted(rows.items()):
        path = f"jaxtrain.models.{module}"
        names = [a for a, family_path in ARCHITECTURES.items() if family_path == path]
        names += [a for (a, _), family_path in TEXTS.items() if family_path == path]
        checked = [a for a in names if a not in UNASKED]
        in_vllm = [a for a in checked if a not in NOT_IN_VLLM]
        served_class = "yes" if len(in_vllm) == len(names) else ("some" if in_vllm else "no")
        adapters = "all Linears, experts too" if row["experts"] else "all Linears"
        order = ("fsdp", "tensor", "context", "expert")
        axes = ", ".join(axis for axis in order if axis in row["axes"]) or "-"
        cells = [
            f"`{module}`",
            adapters,
            "exact" if row["trees"] else "refused",
            "yes" if row["drafts"] else "without drafts",
            axes,
            served_class if checked else "not asked",
            describe_served([served[name] for name in row["names"] if name in served]),
            describe_served([adapted[name] for name in row["names"] if name in adapted]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def describe_served(entries: list[dict]) -> str:
    """Results of a family's tiny exports in vLLM: the largest difference of log-probs, rounded up,
    of those that agree and of those that do not, and vLLM's words where it did not run one."""
    compared = [entry for entry in entries if "difference" in entry]
    close = [entry for entry in compared if is_close(entry)]
    words = []
    for kind in (close, [entry for entry in compared if entry not in close]):
        if kind:
            words.append(describe_difference(max(kind, key=lambda entry: entry["difference"])))
    words += [f"not run: {entry['error']}" for entry in entries if "error" in entry][:1]
    return "; another variant: ".join(words) or "-"


def is_close(entry: dict) -> bool:
    return entry["difference"] <= CLOSE[entry["dtype"]]  # False for what is not a number


def describe_difference(worst: dict) -> str:
    if not is_close(worst):
        return f"differ by {worst['difference']:.1g}"
    unit = 10.0 ** math.floor(math.log10(worst["difference"]))
    bound = f"within {math.ceil(worst['difference'] / unit) * unit:.0e}".replace("e-0", "e-")
    return bound if worst["dtype"] == "float32" else f"{bound} ({worst['dtype']})"


def make_table() -> str:
    """The part between the marks."""
    head = [
        "family",
        "adapters",
        "packed trees",
        "sampler",
        "sharded (tested)",
        "class in vLLM 0.32",
        "its log-probs on a CPU",
        "and with an adapter",
    ]
    return "\n".join(
        [BEGIN, "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *make_rows(), END]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; 1 where it is old")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    new = before + make_table() + after
    if check:
        return int(new != text)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
