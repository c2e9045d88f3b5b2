"""The page about runs: what is in it, what never is, and what a real browser makes of it."""

import asyncio
import base64
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.main import main
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.report.collect import POINTS, collect, thin
from jaxtrain.runs.report.page import ASSETS, render

sys.path.append(str(Path(__file__).parents[1] / "watch"))
from browser import CHROMIUM, open_browser
from folders import HOSTILE, START, write_lines, write_run

SECRETS = ("sk-verysecret12345", "hf_abcdefghijklmnop", "hunter2", "s3cr3t")


def read(*folders: Path) -> list[WatchedRun]:
    runs = [WatchedRun(folder) for folder in folders]
    for run in runs:
        run.read()
    return runs


def embedded(page: str) -> dict:
    """The data of a page."""
    actual = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(actual[1])


def test_what_is_told(tmp_path):
    runs = read(write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=1, state="finished"))
    data = embedded(render(collect(runs)))
    assert data["differing"] == ["run.seed", "optim.learning_rate"]
    first, second = data["runs"]
    assert second["state"] == "finished" and first["total_steps"] == 90
    assert first["curves"]["eval/accuracy"] == [
        [10, 20, 30, 40, 50, 60],
        [0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    ]
    assert (
        data["headline"] == data["charts"][0] == "eval/accuracy" and data["charts"][1] == "reward"
    )
    assert first["result"] == "at step 60 of 90 after 0:01:30: eval/accuracy 0.1000 -> 0.6000."
    assert first["last"]["lag/max"] == 1
    assert [entry["step"] for entry in first["samples"]] == list(range(12, 0, -1))
    assert first["samples"][0]["samples"][0]["answer"][-1][1] == "The answer is 24."
    assert first["hardware"]["GPU use (gpu1)"][1] == [0.925]
    assert len(first["warnings"]) == 2 and first["attempts"][0]["versions"]["jax"] == "0.11.2"
    seconds = first["clock"]["time"]
    assert seconds[0][0] == 1 and seconds[1][-1] == pytest.approx(1.5 * 59 + 0.5)


def test_a_page_is_whole_and_runs_only_its_own_scripts(tmp_path):
    write_run(tmp_path / "a")
    write_lines(tmp_path / "a" / "samples.jsonl", [HOSTILE], "a")
    page = render(collect(read(tmp_path / "a")))
    assert not re.search(r"""(src|href)\s*=\s*["']|url\(|@import""", page), "nothing from elsewhere"
    assert page.count("<script") == page.count("</script>") == 3
    assert "<script>alert" not in page and "\x1b" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy


def test_no_secret_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t")
    folder = write_run(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text())
    config["env"] = {"options": {"api_key": "hunter2", "note": "hf_abcdefghijklmnop"}}
    config["rollout"] = {"vllm": {"servers": ["http://me:hunter2@host:80/?api_key=hunter2"]}}
    (folder / "config.json").write_text(json.dumps(config))
    command = [
        "jaxtrain",
        "--api-key",
        "s3cr3t",
        "--hf-token=s3cr3t",
        "rewards.0.options={k='s3cr3t'}",
    ]
    command += ["env.options.api_key=hunter2", "note=sk-verysecret12345"]
    write_lines(folder / "attempts.jsonl", [{"attempt": 2, "command": command}], "a")
    with (folder / "log.txt").open("a") as log:
        log.write("21:48:00 warning: http://me:hunter2@host refused sk-verysecret12345\n")
    page = render(collect(read(folder)))
    assert not [secret for secret in SECRETS if secret in page]
    assert "<not-saved>" in json.dumps(embedded(page)["runs"][0]["attempts"])


def test_long_curves_are_thinned_by_their_extremes(tmp_path):
    y = np.sin(np.arange(50_000) / 7)
    y[31_234] = 9.0
    keep = thin(np.arange(50_000.0), y)
    assert len(keep) <= POINTS and {0, 49_999, 31_234} <= set(keep.tolist())
    assert (np.diff(keep) > 0).all()
    folder = write_run(tmp_path / "a", steps=2)
    names = [f"metric/{i}" for i in range(26)]
    actual = [
        {"step": s, "time": START + s, **dict.fromkeys(names, s / 7), "loss": float(y[s])}
        for s in range(1, 5000)
    ]
    write_lines(folder / "metrics.jsonl", actual)
    assert len(render(collect(read(folder)))) < 1_200_000


def test_the_verb(tmp_path, capsys):
    write_run(tmp_path / "a" / "run")
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "x.html")]) == 0
    assert (tmp_path / "x.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(tmp_path / "a"), "-o", str(tmp_path / "x.html")]) == 2
    assert main(["report", str(tmp_path / "gone")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    code = "import sys; sys.modules['jax'] = None\nfrom jaxtrain.main import main\n"
    code += (
        f"assert main(['report', {str(tmp_path / 'a')!r}, '-o', {str(tmp_path / 'y.html')!r}]) == 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_charts_library_is_the_one_we_say():
    library = (ASSETS / "uplot" / "uPlot.iife.min.js").read_text()
    assert "uPlot (v1.6.32)" in library.splitlines()[0]
    assert "MIT" in (ASSETS / "uplot" / "LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt install chromium)")
def test_in_a_browser(tmp_path):
    hostile = dict(HOSTILE, step=12, reward=9.0)
    write_lines(write_run(tmp_path / "a") / "samples.jsonl", [hostile], "a")
    write_run(tmp_path / "b", seed=1, steps=90)
    path = tmp_path / "report.html"
    path.write_text(render(collect(read(tmp_path / "a", tmp_path / "b"))))

    async def play() -> None:
        async with open_browser() as page:
            await page.open(path)
            charts = len(
                await page.run("[...document.querySelectorAll('canvas')].map(c => c.width)")
            )
            assert charts == int(await page.run("document.documentElement.dataset.ready")) > 15
            assert await page.run("document.title") == "a, b · jaxtrain"
            # Labels of an axis have the digits that keep neighbors apart.
            labels = "document.querySelector('.card').plot.axes[1].values(null, [{}])"
            assert await page.run(labels.format("1, 1.000001, 1.0000025")) == [
                "1", "1.000001", "1.0000025"
            ]  # fmt: skip
            assert await page.run(labels.format("0, 2e-5, 4e-5")) == ["0", "2e-5", "4e-5"]
            assert await page.run(labels.format("null, 5e5, 15e5")) == ["", "500,000", "1.5e+6"]
            assert await page.run(labels.format("12345678, 12345679")) == [
                "12,345,678", "12,345,679"
            ]  # fmt: skip
            # What strangers wrote is text, and nothing was asked for.
            texts = await page.run("[...document.querySelectorAll('pre')].map(p => p.textContent)")
            assert any("<script>alert(1)</script>" in text and "[/nope]" in text for text in texts)
            assert await page.run("document.querySelectorAll('main script').length") == 0
            # The legend is beside the pointer, in its chart alone, with each run's value there.
            box = "(b => [b.x, b.y, b.width, b.height])"
            box += "(document.querySelector('.card .u-over').getBoundingClientRect())"
            x, y, width, height = await page.run(box)
            await page.call(
                "Input.dispatchMouseEvent", type="mouseMoved", x=x + width / 4, y=y + height / 2
            )
            legends = "[...document.querySelectorAll('.legend:not(.hidden)')].map(e => e.innerText)"
            (legend,) = await page.run(legends)
            assert re.fullmatch(r"step [12]\d\n a 0\.[12]\n b 0\.[12]", legend), legend
            # Dragging in one chart zooms all of them; a double click shows the whole again.
            ends = (
                "[...document.querySelectorAll('.charts:not(.hardware) .card')].filter(c => c.plot)"
            )
            ends += ".map(c => [c.plot.scales.x.min, c.plot.scales.x.max])"
            assert {tuple(end) for end in await page.run(ends)} == {(1, 90)}
            await page.drag(x + width / 4, y + height / 2, x + width / 2)
            zoomed = {tuple(round(v) for v in end) for end in await page.run(ends)}
            assert len(zoomed) == 1 and 15 < min(zoomed)[0] < 30 and 40 < min(zoomed)[1] < 55
            for kind, count in (("mousePressed", 1), ("mouseReleased", 1)) * 2:
                await page.call("Input.dispatchMouseEvent", type=kind, x=x + 50, y=y + 50,
                                button="left", clickCount=count)  # fmt: skip
            await page.run(
                "document.querySelector('.card .u-over').dispatchEvent(new MouseEvent('dblclick'))"
            )
            assert {tuple(end) for end in await page.run(ends)} == {(1, 90)}
            # Filter, log y, smoothing, x by time, a run less.
            shown = "document.querySelectorAll('.charts:not(.hardware) .card:not(.hidden)').length"
            put = "(e, v, k) => { e[k] = v; e.dispatchEvent(new Event('input')) }"
            await page.run(
                f"({put})(document.querySelector('input[type=search]'), '^(loss|reward)$', 'value')"
            )
            assert await page.run(shown) == 2
            first = "document.querySelector('.card:not(.hidden)').plot"
            await page.run(f"({put})(document.querySelectorAll('.bar input')[1], true, 'checked')")
            assert await page.run(f"{first}.scales.y.distr") == 3
            await page.run(f"({put})(document.querySelectorAll('.bar select')[1], 'time', 'value')")
            assert await page.run(f"{first}.scales.x.max") == pytest.approx(1.5 * 89 + 0.5, abs=0.6)
            await page.run(f"({put})(document.querySelectorAll('.bar input')[3], false, 'checked')")
            assert await page.run(f"{first}.series.length") == 2
            back = "getComputedStyle(document.body).backgroundColor"
            light = await page.run(back)
            media = [{"name": "prefers-color-scheme", "value": "dark"}]
            await page.call("Emulation.setEmulatedMedia", features=media)
            assert await page.run(back) != light
            picture = await page.call("Page.captureScreenshot")
            assert len(base64.b64decode(picture["data"])) > 20_000
            assert page.asked == [path.as_uri()] and page.said == []

    asyncio.run(play())
