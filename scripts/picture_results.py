"""Pictures of measurements, each drawn from files of benchmarks/results alone."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from picture_style import BLUE, GRAY, GREEN, ORANGE, TEXT, draw_bars, draw_box, open_figure

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
WINDOW = 5
"""Rounds that a running mean of rewards covers."""


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def draw_attention() -> Figure:
    """Attention on agent trees: the Hopper kernel, Triton and PyTorch's FlexAttention."""
    files = {
        "mosaic_gpu_fused": ("Hopper kernel", "attention_h200.json"),
        "triton": ("Triton", "triton_attention_h200.json"),
        "torch_flex": ("FlexAttention", "attention_h200.json"),
    }
    cases = {"tree8k_h16_8_d128": "tree of 8k tokens", "tree32k_h16_8_d128": "tree of 32k tokens"}
    names = [name for name, _ in files.values()]
    figure = open_figure(5.6, 3.6)
    for axes, (case, title) in zip(figure.subplots(2, 1), cases.items(), strict=True):
        totals = []
        for impl, (_, file) in files.items():
            rows = load(file)["rows"]
            fits = [row for row in rows if (row["case"], row["impl"]) == (case, impl)]
            steps = {row["step"]: row["ms"] for row in reversed(fits)}  # the first run of each
            totals.append(sum(steps.values()))
        draw_bars(axes, names, totals, "{:.1f} ms", [BLUE, GREEN, ORANGE])
        axes.set_title(f"{title}: forward and backward")
    return figure


def draw_remat() -> Figure:
    """Memory and time of LoRA of an 8B model by what the backward pass recomputes."""
    rows = [row for run in load("pod_h200.json") for row in run["rows"]]
    cases = {"none": "lora-whole", "elementwise": "lora-room", "save_attention": "lora"}
    picked = [
        next(
            row
            for row in rows
            if row["name"] == name and row["remat"] == remat and row["peak_gib"] is not None
        )
        for remat, name in cases.items()
    ]
    figure = open_figure(5.6, 3.4)
    first, second = figure.subplots(2, 1)
    draw_bars(first, list(cases), [row["peak_gib"] for row in picked], "{:.0f} GiB")
    draw_bars(second, list(cases), [row["step_s"] for row in picked], "{:.2f} s", GREEN)
    first.set_title("peak memory by model.remat")
    second.set_title("time of a step")
    return figure


def draw_rounds() -> Figure:
    """Parts of the time of a round of GRPO: sync, prefetch and async, on one GPU."""
    rows = load("rl_h200.json")
    names = [row["mode"] for row in rows]
    waits, trains = ([row[key] for row in rows] for key in ("wait s", "train s"))
    totals = [row["round s"] for row in rows]
    figure = open_figure(5.6, 2.2)
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, waits, color=GRAY, height=0.68, label="waits for answers")
    axes.barh(places, trains, left=waits, color=BLUE, height=0.68, label="trains")
    for height, total in zip(places, totals, strict=True):
        axes.text(total + 0.06, height, f"{total:.2f} s", va="center")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(totals) * 1.2)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def draw_rl_calculator() -> Figure:
    """Rewards of the rounds and held-out accuracy of GRPO on the calculator, three seeds."""
    figure = open_figure(5.6, 5.0)
    first, second = figure.subplots(2, 1, sharex=True)
    for seed, color in enumerate((BLUE, ORANGE, GREEN)):
        text = (RESULTS / f"rl_calculator_seed{seed}.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        steps = [line["step"] for line in lines if "reward" in line]
        rewards = np.array([line["reward"] for line in lines if "reward" in line])
        means = [rewards[max(0, i - WINDOW + 1) : i + 1].mean() for i in range(len(rewards))]
        first.plot(steps, means, color=color, label=f"seed {seed}")
        first.plot(steps, rewards, ".", color=color, alpha=0.35)
        held_out = [
            (line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line
        ]
        second.plot(*zip(*held_out, strict=True), "o-", color=color)
    first.set(title=f"reward of a round, and the mean of {WINDOW} rounds", ylim=(0, 1))
    second.set(title="held-out questions right, temperature 1", xlabel="step", ylim=(0, 1))
    first.legend(loc="lower right")
    return figure


def draw_vision_shapes() -> Figure:
    """Rows of builtin:shapes; the loss of SFT, then rewards and held-out accuracy of GRPO."""
    from jaxtrain.data.images.decode import decode
    from jaxtrain.data.sources.shapes import ShapeRows

    text = (RESULTS / "vision_shapes.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]

    def select(run: str, key: str) -> np.ndarray:
        return np.array([(x["step"], x[key]) for x in lines if x["run"] == run and key in x]).T

    figure = open_figure(5.6, 7.2)
    places = figure.subplot_mosaic("012;333;444", height_ratios=[1.0, 1.1, 1.3])
    rows = ShapeRows(num_rows=100, split="test")
    for panel, kind in enumerate(("count", "color", "place")):
        row = next(row for row in rows if row["question"] == kind)
        picture, text = row["messages"][0]["content"]
        axes = places[str(panel)]
        axes.imshow(decode(picture["image"]["bytes"]))
        title = f"{textwrap.fill(text['text'], 20)}\n{row['answer']}"
        axes.set_title(title, fontsize=9, loc="center")
        axes.set(xticks=[], yticks=[])
    places["3"].plot(*select("sft", "loss"), color=BLUE)
    places["3"].set(title="SFT from random weights: loss", xlabel="step", ylim=(0, 0.5))
    axes = places["4"]
    axes.plot(*select("grpo", "reward"), ".", color=GRAY, alpha=0.5, label="reward of a round")
    for key, color, label in (
        ("eval/where/avg@4", BLUE, "held-out, temperature 1"),
        ("eval/where_greedy/avg@1", ORANGE, "held-out, greedy"),
    ):
        axes.plot(*select("grpo", key), "o-", color=color, label=label)
    axes.set(title="GRPO from that model: where is the shape?", xlabel="step", ylim=(0.5, 1))
    axes.legend(loc="upper left")
    return figure


def read_console(name: str, pattern: str) -> np.ndarray:
    """Return [lines, 2] of step and value from a log of the console."""
    matches = re.findall(pattern, (RESULTS / name).read_text())
    return np.array([(int(step), float(value)) for step, value in matches])


def draw_sft_gsm8k() -> Figure:
    """Training and held-out loss of 15M parameters on GSM8K, on two CPU cores."""
    train = read_console("sft_gsm8k_cpu.txt", r"step +(\d+)/120 .*?loss ([\d.]+)")
    held_out = read_console("sft_gsm8k_cpu.txt", r"eval at step (\d+)  loss ([\d.]+)")
    figure = open_figure(5.6, 2.8)
    axes = figure.subplots()
    axes.plot(*train.T, color=BLUE, label="training")
    axes.plot(*held_out.T, "o-", color=ORANGE, label="held-out")
    axes.set(title="GSM8K from random weights: loss", xlabel="step")
    axes.legend()
    return figure


def draw_smollm2() -> Figure:
    """Recipes of configs/real on one H100: losses, GSM8K's accuracy and accepted tokens."""
    lines = [json.loads(line) for line in (RESULTS / "smollm2_h100.jsonl").read_text().splitlines()]

    def select(run: str, key: str) -> np.ndarray:
        return np.array([(x["step"], x[key]) for x in lines if x["run"] == run and key in x]).T

    panels = {
        "held-out loss": ("eval/loss", {"sft": "all weights", "lora": "LoRA"}),
        "GSM8K right, greedy, of 1,319": (
            "eval/gsm8k/avg@1",
            {"sft": "all weights", "lora": "LoRA", "grpo": "GRPO after it"},
        ),
        "accepted tokens a pass, held out": (
            "eval/accept_len",
            {"dflash": "DFlash", "eagle3": "Eagle3"},
        ),
        "training loss": ("loss", {"sft": "all weights", "lora": "LoRA"}),
    }
    figure = open_figure(7.2, 4.6)
    for axes, (title, (key, runs)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for (run, label), color in zip(runs.items(), (BLUE, ORANGE, GREEN), strict=False):
            axes.plot(*select(run, key), "o-", markersize=3, color=color, label=label)
        axes.set(title=title, xlabel="step")
        axes.legend()
    return figure


def draw_sft_speed() -> Figure:
    """Tokens a second of the 0.6B shape with and without kernels, LoRA and recomputation."""
    runs = {
        "layers unrolled": "unroll",
        "default": "no_triton",
        "LoRA": "lora",
        "save_attention": "save",
        "no Hopper kernels": "xla",
    }
    rates = []
    for run in runs.values():
        text = (RESULTS / f"sft_qwen3_0.6b_h200_{run}.txt").read_text()
        matches = re.findall(r"([\d.]+)k tok/s/dev", text)
        rates.append(float(np.median([float(rate) for rate in matches])))
    figure = open_figure(5.6, 2.4)
    axes = figure.subplots()
    draw_bars(axes, list(runs), rates, "{:.0f}k", [BLUE, BLUE, GREEN, GREEN, GRAY])
    axes.set_title("tokens a second, Qwen3-0.6B's shape")
    return figure


def draw_kernel_parity() -> Figure:
    """Losses with the Hopper kernels, without them, and with another order of the same sums."""
    losses = load("loss_parity_h200.json")["losses"]
    figure = open_figure(5.6, 2.8)
    axes = figure.subplots()
    styles = {"xla": (ORANGE, 5, 0.5), "reordered": (GRAY, 2, 0.9), "kernels": (BLUE, 1.3, 1)}
    labels = {"xla": "plain XLA", "reordered": "XLA, other order", "kernels": "Hopper kernels"}
    for name, (color, width, alpha) in styles.items():
        steps = range(1, len(losses[name]) + 1)
        axes.plot(steps, losses[name], color=color, lw=width, alpha=alpha, label=labels[name])
    axes.set(title="the same run, three times", xlabel="step", ylabel="loss")
    axes.legend()
    return figure


def draw_fp8_loss() -> Figure:
    """Held-out loss with products in FP8 beside three seeds in bfloat16."""
    lines = (RESULTS / "fp8_gsm8k_h200.txt").read_text().splitlines()
    steps = [int(step) for step in next(x for x in lines if x.startswith("step")).split()[1:]]
    figure = open_figure(5.6, 2.8)
    axes = figure.subplots()
    for line in lines:
        run, _, numbers = line.partition("  ")
        fp8 = run.startswith("fp8")
        values = [float(value) for value in numbers.split()] if fp8 or run[:4] == "bf16" else []
        if len(values) == len(steps):
            style = {"color": BLUE if fp8 else GRAY, "lw": 2.4 if fp8 else 1.3}
            axes.plot(steps[1:], values[1:], label=run, **style)
    axes.set(title="held-out loss, FP8 and bfloat16", xlabel="step")
    axes.legend()
    return figure


def draw_drafts() -> Figure:
    """Tokens a second of decoding with drafts, by rows decoded at once."""
    rows = load("draft_pair_h200.json")["rows"]
    counts = [row["rows"] for row in rows]
    figure = open_figure(5.6, 2.8)
    axes = figure.subplots()
    for name, color in (("plain", GRAY), ("dflash", BLUE), ("eagle3", ORANGE)):
        rates = [row[name]["tokens_per_s"] for row in rows]
        axes.plot(counts, rates, "o-", color=color, label=name)
    axes.set(xscale="log", yscale="log", xlabel="rows decoded at once", title="tokens a second")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.legend()
    return figure


def draw_sampler() -> Figure:
    """Tokens a second and memory of the local sampler by rows."""
    cases = [
        case
        for case in load("sampling_h200.json")["cases"]
        if case["note"].startswith("XLA_FLAGS") and case.get("cache") == "default"
    ]
    names = [f"{case['rows']} rows" for case in cases]
    figure = open_figure(5.6, 3.2)
    first, second = figure.subplots(2, 1)
    draw_bars(first, names, [case["tok/s"] / 1000 for case in cases], "{:.1f}k")
    draw_bars(second, names, [case["peak GiB"] for case in cases], "{:.0f} GiB", GREEN)
    first.set_title("local sampler: tokens a second")
    second.set_title("peak memory")
    return figure


def draw_weight_sync() -> Figure:
    """Seconds until a server has new weights of 8B parameters, by transport."""
    seconds: dict[str, list[float]] = {}
    for run in load("weight_sync_h200.json")["runs"]:
        for row in run["rows"]:
            if row.get("servers") == 1 and row["base"] == "device":
                seconds.setdefault(f"{row['transport']}, {row['kind']}", []).append(row["seconds"])
    names = ["shared, full", "tcp, full", "tcp, delta"]
    figure = open_figure(5.6, 1.8)
    axes = figure.subplots()
    medians = [float(np.median(seconds[name])) for name in names]
    draw_bars(axes, names, medians, "{:.1f} s")
    axes.set_title("new weights of an 8B model in one server")
    return figure


def draw_peers() -> Figure:
    """Steps beside PyTorch on the same GPU, from the files of each benchmark."""
    trees = next(
        run["rows"]
        for run in load("train_step_h200.json")
        if "--peer torch --trace" in run["command"]
    )
    hybrid = load("hybrid_step_peer_h200.json")["rows"]
    pairs = {
        "agent tree, 8k tokens": [row["step_s"] for row in trees],
        "Qwen3.5-0.8B's shape, 8k": [row["step_s"] for row in hybrid if row["work"] == "docs8k"],
        "experts in NF4, LoRA": [
            row["step_s"] for row in load("experts_nf4_h200.json")[0]["rows"][:2]
        ],
        "strided EBFT": [row["step_s"] for row in load("ebft_strided_h200.json")["rows"]],
    }
    figure = open_figure(5.6, 3.4)
    axes = figure.subplots()
    places = np.arange(len(pairs))
    for side, (shift, color) in enumerate(((-0.2, BLUE), (0.2, ORANGE))):
        values = [pair[side] for pair in pairs.values()]
        bars = axes.barh(places + shift, values, 0.36, color=color)
        axes.bar_label(bars, [f"{value:.2f} s" for value in values], padding=4)
    axes.set_yticks(places, list(pairs))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.7)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title("one step: jaxtrain (blue), PyTorch (orange)")
    return figure


def draw_step_profile() -> Figure:
    """Parts of the time of a step on an agent tree on the GPU."""
    text = (RESULTS / "train_step_profile_h200.txt").read_text().split("\n\n")[0]
    matches = re.findall(r"^ +([\d.]+) ms +\d+ calls  (.+)$", text, flags=re.M)
    figure = open_figure(5.6, 2.9)
    axes = figure.subplots()
    values = [float(value) for value, _ in matches]
    draw_bars(axes, [name for _, name in matches], values, "{:.1f} ms")
    axes.set_title("kernels of one step, 8k agent tree")
    return figure


ROOMS = [
    ("methods", BLUE, "a folder per training method"),
    ("generation", BLUE, "samplers, servers, weight sync"),
    ("environments", BLUE, "worlds, rewards, sandbox"),
    ("core", ORANGE, "loop, step, roles, hooks"),
    ("runs", GREEN, "folder, checkpoints, dashboard"),
    ("data", GREEN, "rows, chats, packing"),
    ("models, layers, adapters", GRAY, "networks"),
    ("jaxtrain_kernels", GRAY, "attention and other ops"),
    ("config", GRAY, "keys, checked and documented"),
]


def draw_rooms() -> Figure:
    """The packages from top to bottom: each imports only what lies below it."""
    figure = open_figure(5.6, 5.0)
    axes = figure.subplots()
    for line, (name, color, about) in enumerate(ROOMS):
        draw_box(axes, (1.6, -line), name, color, width=3.2, height=0.72)
        axes.text(3.4, -line, about, va="center")
    last = len(ROOMS) - 1
    arrow = {"arrowstyle": "->", "color": TEXT, "lw": 1.5}
    axes.annotate("", (-0.3, -last - 0.3), (-0.3, 0.3), arrowprops=arrow)
    axes.text(-0.55, -last / 2, "imports", rotation=90, va="center", ha="center")
    axes.set_xlim(-0.8, 7.2)
    axes.set_ylim(-last - 0.6, 0.6)
    axes.axis("off")
    return figure


PICTURES = {
    "attention": draw_attention,
    "remat": draw_remat,
    "rl_rounds": draw_rounds,
    "rl_calculator": draw_rl_calculator,
    "vision_shapes": draw_vision_shapes,
    "sft_gsm8k": draw_sft_gsm8k,
    "smollm2": draw_smollm2,
    "sft_speed": draw_sft_speed,
    "kernel_parity": draw_kernel_parity,
    "fp8_loss": draw_fp8_loss,
    "drafts": draw_drafts,
    "sampler": draw_sampler,
    "weight_sync": draw_weight_sync,
    "peers": draw_peers,
    "step_profile": draw_step_profile,
    "rooms": draw_rooms,
}
