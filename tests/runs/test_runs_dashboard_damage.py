"""Files with anything in them: every screen, the facts and the report still come."""

import json
import tempfile
from pathlib import Path

import pytest
from folders import write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from watching import Watching, watch

from jaxtrain.runs.dashboard.status import facts
from jaxtrain.runs.report.collect import collect
from jaxtrain.runs.report.page import render

KEYS = (
    "step time loss reward tokens step_seconds eval/a prompt completion rewards role content name"
    " tool_calls function arguments finish_reason policy_version set state message total_steps"
    " start_step attempt started pid host phase moved url version in_flight why since gpus index"
    " use memory memory_total temperature power cpu task kind model path run max_steps log"
    " watchdog_seconds devices command versions checkpoint best_metric best_mode adapter"
).split()
SMALL = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["running", "finished", "[/x]", "\x1b[2J", "日本", "rl", "\ud800"]),
)
ANY = st.recursive(
    SMALL,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=6)
    ),
    max_leaves=12,
)
TABLE = st.dictionaries(st.sampled_from(KEYS), ANY, max_size=12)
JSONL = ("metrics.jsonl", "samples.jsonl", "attempts.jsonl", "hardware/gpu1.jsonl")
FILES = st.fixed_dictionaries(
    {
        **dict.fromkeys(JSONL, st.lists(TABLE, max_size=4)),
        "config.json": TABLE,
        "heartbeat.json": TABLE,
        "servers.json": st.one_of(ANY, st.lists(TABLE, max_size=3)),
        "log.txt": st.text(max_size=60),
    }
)


@pytest.mark.thorough  # a whole dashboard for each example
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(FILES)
def test_any_files_can_be_looked_at(files):
    with tempfile.TemporaryDirectory() as folder:
        path = write_run(Path(folder) / "run", steps=4)
        for name, value in files.items():
            if name == "log.txt":
                text = value
            elif name in JSONL:  # behind what is sound
                text = (path / name).read_text() + "".join(json.dumps(v) + "\n" for v in value)
            else:
                text = json.dumps(value)
            (path / name).write_bytes(text.encode(errors="surrogatepass"))
        other = write_run(Path(folder) / "other", steps=3)

        async def script(watching: Watching) -> None:
            for keys in ("enter", "escape 2", "enter", "3", "4", "5"):
                await watching.press(keys)

        runs = watch([path, other], script, (90, 34)).view.runs
        json.dumps(facts(runs[0]), allow_nan=False)
        assert render(collect(runs)).encode()
