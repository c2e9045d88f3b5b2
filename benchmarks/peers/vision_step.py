"""transformers' side of vision_step.py: its own model in several settings, a JSON line for each.

python benchmarks/peers/vision_step.py JOB.json     # called by vision_step.py

A plain loop over prepared rows: what a trainer adds around the step is not counted.
"""

import gc
import json
import sys
import time
from pathlib import Path

import torch
import transformers
from timing import measure_steps

GPU = torch.cuda.is_available()
SETTINGS = (
    {"rows": 4, "checkpointing": False, "weights": "float32"},
    {"rows": 8, "checkpointing": False, "weights": "float32"},
    {"rows": 4, "checkpointing": False, "weights": "bfloat16"},
    {"rows": 8, "checkpointing": True, "weights": "float32"},
)
"""The best first: rows of a step, recomputation, type of the masters."""


def make_inputs(job: dict, rows: int, device: str) -> dict[str, torch.Tensor]:
    """Return random rows as the processor and collator make them."""
    raw, torch_seed = job["architecture"], torch.Generator().manual_seed(0)
    vision = raw["vision_config"]
    side = job["side"] // vision["patch_size"]
    tokens = side * side // vision["spatial_merge_size"] ** 2
    picture = [raw["vision_start_token_id"], *[raw["image_token_id"]] * tokens]
    picture.append(raw["vision_end_token_id"])
    text = torch.randint(0, 256, (rows, job["text"]), generator=torch_seed)
    head = torch.tensor(picture * job["pictures"]).expand(rows, -1)
    ids = torch.cat([head, text], 1)
    labels = ids.clone()
    labels[:, : head.shape[1] + job["text"] // 2] = -100
    count = rows * job["pictures"]
    patch = 3 * 2 * vision["patch_size"] ** 2
    return {
        "input_ids": ids.to(device),
        "labels": labels.to(device),
        "attention_mask": torch.ones_like(ids).to(device),
        "mm_token_type_ids": (ids == raw["image_token_id"]).int().to(device),
        "pixel_values": torch.randn(count * side * side, patch, generator=torch_seed).to(device),
        "image_grid_thw": torch.tensor([[1, side, side]] * count).to(device),
    }


def measure(job: dict, setting: dict) -> dict:
    """Return the rates and memory of one setting."""
    device = "cuda" if GPU else "cpu"
    config = transformers.Qwen3VLConfig(**job["architecture"])
    dtype = getattr(torch, setting["weights"])
    with torch.device(device):
        model = transformers.Qwen3VLForConditionalGeneration._from_config(
            config, dtype=dtype, attn_implementation="sdpa"
        )
    model.train()
    if setting["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    inputs = make_inputs(job, setting["rows"], device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=GPU)

    def step() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=GPU):
            loss = model(**inputs, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    row = measure_steps(step, 3, job["steps"], GPU)
    return {
        "tokens_per_s": inputs["input_ids"].numel() / row["step_s"],
        "loss": [row.pop("loss"), row.pop("loss_after")],
        "first_s": row.pop("compile_s"),
        **row,
    }


def add_liger(config: dict) -> str:
    """Patch transformers with Liger's kernels where they are installed; return their name."""
    try:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl
    except ImportError:
        return ""
    apply_liger_kernel_to_qwen3_vl()
    return ", Liger"


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    transformers.logging.set_verbosity_error()
    torch.set_float32_matmul_precision("high")
    if not GPU:
        torch.set_num_threads(1)
    liger = add_liger(job) if GPU else ""
    longest = 0.0
    for setting in SETTINGS:
        begin = time.time()
        if begin + longest > job["deadline"]:
            break
        how = f"{setting['rows']} rows a step, {setting['weights']} weights{liger}"
        row: dict = {"how": how + (", checkpointing" if setting["checkpointing"] else "")}
        try:
            row |= measure(job, setting)
        except Exception as reason:  # this setting is recorded as failed
            row["failed"] = f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
        longest = max(longest, time.time() - begin)
        with Path(job["rows"]).open("a") as file:
            file.write(json.dumps(row) + "\n")
        gc.collect()
        if GPU:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
