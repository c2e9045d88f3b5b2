"""Reward functions in their processes: results, hangs, crashes, mistakes."""

import asyncio
import os
import subprocess
import sys
import textwrap
import time

import pytest

from jaxtrain.config.rewards import RewardConfig
from jaxtrain.environments.rewards import score as scoring
from jaxtrain.environments.rewards.score import choose_workers, open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episodes import Episode

SOURCE = """
import os, time

def count(completions, letter="a", **columns):
    return [c.count(letter) for c in completions]

def uses_columns(completions, prompts, completion_ids, gold):
    return [float(g) + len(ids) for g, ids in zip(gold, completion_ids)]

async def later(completions, **columns):
    return [None if c == "skip" else float("nan") if c == "nan" else 1.0 for c in completions]

def hang(completions, **columns):
    if "hang" in completions[0]:
        while True:
            time.sleep(1)
    return [1.0] * len(completions)

def crash(completions, **columns):
    os._exit(7)

def bad(completions, **columns):
    return [{}["missing"]]

def short(completions, **columns):
    return [1.0]

def away(completions, file, **columns):
    if not os.path.exists(file):
        open(file, "w").close()
        raise ConnectionRefusedError("the judge is away")
    return [1.0] * len(completions)

def leave(completions, **columns):
    raise SystemExit(0)

class Pickled:
    def __init__(self, path):
        self.path = path
    def __reduce__(self):
        return os.mkdir, (self.path,)

def forge(completions, path, form, **columns):
    import gc, json
    from multiprocessing.connection import Connection
    pipe = next(x for x in gc.get_objects() if type(x) is Connection)
    if form == "pickle":
        pipe.send(Pickled(path))
    else:
        pipe.send_bytes(form.encode())

def pid(completions, **columns):
    print("noise on stdout")
    return [os.getpid()] * len(completions)
"""


@pytest.fixture
def make(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(SOURCE))
    opened = []

    def make(*names, retries=0, **fields):
        sections = [RewardConfig(function=f"{path}:{name}", **fields) for name in names]
        opened.append(open_rewards(sections, workers=2, retries=retries))
        return opened[-1]

    yield make
    for rewards in opened:
        rewards.close()


def score(rewards, completions, row=None, lengths=None, local_value=()):
    """Scores of episodes with these completions, of so many drawn tokens after a prompt of one."""
    lengths = lengths or [1] * len(completions)
    episodes = [
        Episode(
            tokens=[9] + [1] * length,
            sampled=[False] + [True] * length,
            logprobs=[0.0] * (length + 1),
            versions=[-1] * (length + 1),
            finish_reason="stop",
            completion=completion,
            rewards=dict(local_value),
        )
        for completion, length in zip(completions, lengths, strict=True)
    ]
    return asyncio.run(rewards.score(episodes, row or {}))


def test_functions_are_called_as_trl_calls_them(make):
    rewards = make("count", "uses_columns", "later")
    row = {"gold": "2", "unused": 1}
    actual = score(rewards, ["aab", "skip"], row, lengths=[1, 2])
    assert actual == [
        {"count": 2.0, "uses_columns": 3.0, "later": 1.0},
        {"count": 0.0, "uses_columns": 4.0, "later": None},
    ]
    with pytest.raises(EpisodeFailed, match="reward later is NaN or infinite") as failed:
        score(rewards, ["nan"], row)
    assert "rewards.2 (function" in failed.value.cause
    assert rewards.counters["rewards/later/not_finite"] == 1


def test_total_is_the_weighted_sum_of_what_is_there(make):
    rewards = make("count", weight=0.5)
    assert rewards.total({"count": 3.0}) == 1.5
    assert rewards.total({"count": None}) is None
    assert make("count", "hang", weight=2.0).total({"count": 1.0, "hang": None}) == 2.0


def test_what_the_environment_gave_is_part_of_the_sum(make):
    actual = score(make("count"), ["aa"], local_value={"solved": 1.0})
    assert actual == [{"solved": 1.0, "count": 2.0}] and make("count").total(actual[0]) == 3.0
    assert score(open_rewards([]), ["aa"], local_value={"solved": 0.5}) == [{"solved": 0.5}]


@pytest.mark.parametrize(
    ("functions", "cores", "count"),
    [
        (["math"], 16, 8),
        (["math", "format"], 4, 3),
        (["math"], 1, 1),
        (["math", "mine.py:score"], 16, 1),
        ([], 16, 8),
    ],
)
def test_built_in_functions_run_in_several_processes(functions, cores, count, monkeypatch):
    # A user's function may hold a model or count its calls.
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert choose_workers([RewardConfig(function=name) for name in functions]) == count


def test_options_reach_the_function(make):
    assert score(make("count", options={"letter": "b"}), ["abb"]) == [{"count": 2.0}]


def test_a_hanging_reward_is_killed_counted_and_the_next_call_works(make):
    rewards = make("hang", timeout=1.0)
    start = time.monotonic()
    with pytest.raises(EpisodeFailed, match="reward hang timed out"):
        score(rewards, ["hang", "x"])
    assert time.monotonic() - start < 30
    assert rewards.counters["rewards/hang/timeout"] == 1
    assert score(rewards, ["fine"]) == [{"hang": 1.0}]


def test_a_crash_or_an_exception_is_a_failure_with_its_place(make):
    rewards = make("crash", "bad")
    with pytest.raises(EpisodeFailed, match="reward crash ended its process"):
        score(rewards.only(["crash"]), ["a"])
    with pytest.raises(EpisodeFailed, match="reward bad raised KeyError") as failed:
        score(rewards.only(["bad"]), ["a"])
    assert "KeyError: 'missing' (" in failed.value.cause and "rewards.1" in failed.value.cause
    assert "Traceback" in failed.value.trace and len(failed.value.trace) < 2000


def test_a_function_that_leaves_is_a_failure_with_its_place(make):
    with pytest.raises(EpisodeFailed, match="reward leave raised SystemExit") as failed:
        score(make("leave"), ["a"])
    assert "it ends the program, by sys.exit(0) (" in failed.value.cause


@pytest.mark.parametrize(
    "form",
    [
        "pickle",
        '["ok",[NaN],""]',
        *(
            pytest.param(form, marks=pytest.mark.slow)
            for form in ('["ok",[1,"2"],""]', '["crash","",""]', "{}", "[" * 10**5)
        ),
    ],
)
def test_what_a_worker_sends_is_never_unpickled(make, tmp_path, form):
    """A reward that has the worker's own pipe: it is a crash, and nothing of it ran here."""
    path = tmp_path / "was_here"
    rewards = make("forge", options={"path": str(path), "form": form})
    with pytest.raises(EpisodeFailed, match="reward forge ended its process") as failed:
        score(rewards, ["a"])
    assert "something else than a reply" in failed.value.cause and not path.exists()


def test_a_judge_that_is_away_for_a_moment_is_asked_again(make, tmp_path, monkeypatch):
    monkeypatch.setattr(scoring, "pause_before", lambda attempt: 0.01)
    rewards = make("away", retries=2, options={"file": str(tmp_path / "there")})
    assert score(rewards, ["a"]) == [{"away": 1.0}]
    assert rewards.counters["rewards/away/error"] == 1


def test_a_result_of_the_wrong_length_is_a_mistake(make):
    with pytest.raises(EpisodeFailed) as failed:
        score(make("short"), ["a", "b"])
    assert failed.value.mistake and "list of 2" in failed.value.cause


def test_functions_run_elsewhere_and_may_print(make):
    actual = score(make("pid"), ["a"])[0]["pid"]
    assert actual != os.getpid()


@pytest.mark.parametrize(
    "name, message",
    [
        ("exact_mach", "there is no 'exact_mach'; did you mean 'exact_match'"),
        pytest.param("no.such.module:f", "cannot be imported", marks=pytest.mark.slow),
        pytest.param("json.nothing", "json has no 'nothing'", marks=pytest.mark.slow),
    ],
)
def test_a_name_that_leads_nowhere_is_said_before_the_run(name, message):
    with pytest.raises(UserError, match=message):
        open_rewards([RewardConfig(function=name)])


def test_a_worker_starts_with_little():
    """A run waits for its first answers' rewards, and imports would be most of that."""
    code = "import sys, jaxtrain.environments.rewards.worker; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    modules = set(output.split())
    assert "jaxtrain.environments.rewards.worker" in modules
    assert not modules & {"jax", "numpy", "pydantic", "jaxtrain.config"}


@pytest.mark.slow
def test_a_hanging_worker_ends_with_its_parent(tmp_path):
    path = tmp_path / "forever.py"
    path.write_text(
        "import os, time\n"
        f"def forever(completions, **columns):\n"
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        "    time.sleep(600)\n"
    )
    code = (
        "import asyncio\nfrom jaxtrain.config.rewards import RewardConfig\n"
        "from jaxtrain.environments.rewards.score import choose_workers, open_rewards\n"
        "from jaxtrain.generation.episodes import Episode\n"
        f"r = open_rewards([RewardConfig(function={str(path) + ':forever'!r}, timeout=600)])\n"
        "e = Episode([1], [True], [0.0], [-1], 'stop', completion='a')\n"
        "asyncio.run(r.score([e], {}))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        pid = wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not alive(int(pid)))  # a worker that outlives its parent fails here


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if actual := condition():
            return actual
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
