"""A real NeMo Gym 0.7: an own environment and one of its package, by agent and by verdict.

Skipped without JAXTRAIN_GYM_PYTHON, the interpreter of an environment with nemo-gym in it.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.config.gym import GymConfig
from jaxtrain.data.sources.calculator import CalculatorRows
from jaxtrain.environments.guarded import open_guarded
from jaxtrain.environments.gym_config import find_free_port, find_packages
from jaxtrain.environments.gym_process import GymProcess
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed

PYTHON = os.environ.get("JAXTRAIN_GYM_PYTHON", "")
EXAMPLE = Path(__file__).parents[2] / "examples" / "nemo_gym"
PACKAGES = find_packages(Path(PYTHON), "") if PYTHON else Path()
CONFIGS = ["jx_calc", "example_multi_step", "workplace_assistant"]
if (PACKAGES / "math_verify").exists():  # what this one requires
    CONFIGS.append("math_with_judge")
SAMPLING = SamplingConfig(max_new_tokens=200, temperature=1.0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="JAXTRAIN_GYM_PYTHON names no environment of NeMo Gym"),
]


def call(name, **arguments):
    actual = json.dumps({"name": name, "arguments": arguments})
    return f"<think>I need {name}.</think>\n<tool_call>{actual}</tool_call>"


@pytest.fixture(scope="module")
def gym(tokenizer, tmp_path_factory):
    """(mode, agent) -> an environment; all of them of one Gym."""
    folder, opened = tmp_path_factory.mktemp("run"), []
    section = {
        "start": True,
        "python": PYTHON,
        "directory": str(EXAMPLE),
        "configs": [f"resources_servers/{name}/configs/{name}.yaml" for name in CONFIGS],
    }

    def open_one(**extra):
        config = EnvConfig(kind="nemo_gym", gym=section | extra)
        opened.append(open_guarded(config, tokenizer, 32768, "env", None, str(folder)))
        return opened[-1]

    yield open_one
    for env in opened:
        env.close()
    remaining = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True).stdout
    assert not remaining, f"processes outlived the run: {remaining}"


def play(env, tokenizer, rows, texts):
    async def work():
        pairs = zip(rows, texts, strict=True)
        return await asyncio.gather(
            *(
                env.run(row, ScriptedEngine(tokenizer, list(t)), SAMPLING, i)
                for i, (row, t) in enumerate(pairs)
            )
        )

    return asyncio.run(work())


def check(tokenizer, episodes, texts):
    """Check that each episode is one sequence whose drawn tokens are exactly the policy's."""
    (end,) = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    for episode, output in zip(episodes, texts, strict=True):
        encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in output]
        assert episode.drawn_tokens == [token for ids in encoded for token in [*ids, end]]
        assert episode.metrics["branches"] == 1 and episode.metrics["turns"] == len(output)


def example_rows(name, count):
    position = PACKAGES / "resources_servers" / name / "data" / "example.jsonl"
    return [json.loads(line) for line in position.read_text().splitlines()[:count]]


def calculator_rows(count):
    sys.path.insert(0, str(EXAMPLE))
    try:
        from make_rows import make_row
    finally:
        sys.path.remove(str(EXAMPLE))
    rows = CalculatorRows(count, follow_up=0)
    return [make_row(rows[i]) for i in range(count)]


def test_own_environment_by_its_agent(gym, tokenizer):
    rows = calculator_rows(6)
    texts = [
        [
            call("calculator", expression="2 + 3"),
            f"The answer is {row['answer'] if i % 2 else 'no'}.",
        ]
        for i, row in enumerate(rows)
    ]
    episodes = play(gym(agent="jx_calc_agent"), tokenizer, rows, texts)
    check(tokenizer, episodes, texts)
    assert [episode.rewards for episode in episodes] == [{"gym": float(i % 2)} for i in range(6)]
    assert all("<tool_response>5<" in tokenizer.decode(episode.tokens) for episode in episodes)
    assert [episode.metrics["called"] for episode in episodes] == [1.0] * 6
    answers = [text[-1:] for text in texts]
    judged = play(gym(agent="jx_calc_agent", mode="verify"), tokenizer, rows, answers)
    check(tokenizer, judged, answers)
    assert [episode.rewards["gym"] for episode in judged] == [float(i % 2) for i in range(6)]
    assert [episode.metrics["called"] for episode in judged] == [0.0] * 6


def test_an_environment_of_the_package_with_many_turns(gym, tokenizer):
    rows = example_rows("example_multi_step", 2)
    texts = [
        [
            *(call("get_synonym_value", synonym=word) for word in row["expected_synonyms"]),
            call("extract_synonym_values", synonym_values=row["expected_synonym_values"]),
            "Done.",
        ]
        for row in rows
    ]
    texts[1] = ["I do not know."]
    episodes = play(gym(agent="example_multi_step_simple_agent"), tokenizer, rows, texts)
    check(tokenizer, episodes, texts)
    assert [episode.rewards["gym"] for episode in episodes] == [1.0, 0.0]


def test_twenty_seven_tools(gym, tokenizer):
    """workplace_assistant: what a call changes in its databases is judged."""
    (row,) = example_rows("workplace_assistant", 1)
    rows, texts = [row, row], [["Done."], []]
    for expected in json.loads(json.dumps(row["ground_truth"])):
        texts[1].append(call(expected["name"], **json.loads(expected["arguments"])))
    texts[1].append("Done.")
    episodes = play(gym(agent="workplace_assistant_simple_agent"), tokenizer, rows, texts)
    check(tokenizer, episodes, texts)
    assert [episode.rewards["gym"] for episode in episodes] == [0.0, 1.0]


AGENT = """from responses_api_agents.simple_agent.app import SimpleAgent


class Mine(SimpleAgent):
    pass


if __name__ == "__main__":
    Mine.run_webserver()
"""
AGENT_CONFIG = """mine:
  responses_api_agents:
    mine:
      entrypoint: app.py
      resources_server: {type: resources_servers, name: jx_calc}
      model_server: {type: responses_api_models, name: policy_model}
      max_steps: 3
"""


def test_a_gym_of_somebody_else_with_own_servers_that_is_started_again(tokenizer, tmp_path):
    """A folder of custom servers: inspected while it starts, lost, and found again."""
    local_value = tmp_path / "own"
    shutil.copytree(EXAMPLE / "resources_servers", local_value / "resources_servers")
    position = local_value / "responses_api_agents" / "mine"
    (position / "configs").mkdir(parents=True)
    (position / "app.py").write_text(AGENT)
    (position / "requirements.txt").write_text("nemo-gym\n")
    (position / "configs" / "mine.yaml").write_text(AGENT_CONFIG)
    head, port = find_free_port(), find_free_port()
    overrides = {"head_server": {"port": head}}
    config = GymConfig(start=True, python=PYTHON, directory=str(local_value), overrides=overrides)
    policy = PolicyServer(tokenizer, max_model_len=4096, port=port, token="of the test")
    outside = GymProcess(config, policy, tmp_path / "outside", "env.gym")
    outside.start()
    section = {"head": f"http://127.0.0.1:{head}", "port": port, "api_key": "of the test"}

    def open_one(**extra):
        return open_guarded(EnvConfig(kind="nemo_gym", gym=section | extra), tokenizer, 4096)

    env, output = open_one(agent="mine"), []
    try:
        env.inspect([], output.append)
        assert output[0].startswith("waiting for NeMo Gym at"), output
        assert output[1].endswith("agents jx_calc_agent, mine"), output
        with pytest.raises(UserError, match=r"'math'; it must be an agent of jx_calc_agent, mine"):
            open_one(agent="math").inspect([], output.append)
        rows = [calculator_rows(1)[0]] * 3
        texts = [[call("calculator", expression="2 + 3"), "It is 5."]] * 3
        check(tokenizer, play(env, tokenizer, rows, texts), texts)
        outside.stop()
        threading.Timer(5.0, outside.start).start()
        started = time.monotonic()
        with pytest.raises(EpisodeFailed, match="connection lost"):
            play(env, tokenizer, rows, texts)
        print(f"found again after {time.monotonic() - started:.0f} s")
        assert env.counters() == {"gym/restarts": 1.0}
        check(tokenizer, play(env, tokenizer, rows, texts), texts)
    finally:
        env.close()
        outside.stop()
    remaining = subprocess.run(
        ["pgrep", "-f", str(tmp_path)], capture_output=True, text=True
    ).stdout
    assert not remaining, f"processes outlived the run: {remaining}"


def test_a_gym_of_the_run_that_was_killed_is_started_again(gym, tokenizer):
    env = gym(agent="jx_calc_agent")
    rows, texts = calculator_rows(2), [["It is 5."]] * 2
    check(tokenizer, play(env, tokenizer, rows, texts), texts)
    servers = env.env.servers
    completed = subprocess.run(
        ["pgrep", "-fa", f"gym env start .*{servers.folder}"], capture_output=True, text=True
    )
    (pid,) = [
        line.split()[0] for line in completed.stdout.splitlines() if "run_supervised.py" not in line
    ]
    os.kill(int(pid), signal.SIGKILL)
    end = time.monotonic() + 30
    while servers._process.status() is None and time.monotonic() < end:
        time.sleep(0.5)
    with pytest.raises(EpisodeFailed, match="gym: "):
        play(env, tokenizer, rows, texts)
    assert env.counters() == {"gym/restarts": 1.0}
    check(tokenizer, play(env, tokenizer, rows, texts), texts)


@pytest.mark.skipif("math_with_judge" not in CONFIGS, reason="math_verify is not installed there")
def test_mathematics_by_its_verdict(gym, tokenizer):
    """Rows like those of GSM8K, one answer, no agent."""
    rows = example_rows("math_with_judge", 1) * 2
    texts = [[r"<think>31?</think>It is \boxed{32}."], [r"It is \boxed{31}."]]
    env = gym(agent="math_with_judge_simple_agent", mode="verify")
    episodes = play(env, tokenizer, rows, texts)
    check(tokenizer, episodes, texts)
    assert [episode.rewards["gym"] for episode in episodes] == [1.0, 0.0]
