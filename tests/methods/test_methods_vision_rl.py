"""GRPO on prompts with images, drawn by the local sampler; evaluation sets with images."""

import base64
import json

import pytest
from serving_toy import serving
from smolvlm_text import TEMPLATE
from test_methods_vision import FOLDER, FOLDERS, SMOLVLM, save_start

from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.main import main
from jaxtrain.text_safety import escape_control_chars

RUN = """
[parallel]
data = 1
fsdp = -1
[data]
sequence_len = 128
micro_batch_size = 2
datasets = [{{ path = "{folder}/train.jsonl" }}]
[optim]
learning_rate = 1e-3
lr_scheduler = "constant"
[run]
max_steps = 3
[task]
kind = "rl"
num_minibatches = 2
[rollout]
engine = "local"
prompts_per_step = 4
group_size = 4
[sampling]
temperature = 1.0
max_new_tokens = 6
[[rewards]]
function = "{folder}/judge.py:judge"
[eval]
every = 3
sets = [{{ path = "{folder}/train.jsonl", k = 2 }}]
"""
WALKING = RUN.partition("[[rewards]]")[0].replace("128", "256").replace("steps = 3", "steps = 2")
GAP = "sampling/sampling_logp_difference/max"
JUDGE = '''
import json
from pathlib import Path


def judge(prompts, completions, images, answer):
    """Reward vowels and rows with long answers; note what is judged."""
    for prompt, listed in zip(prompts, images):
        with open(Path(__file__).parent / "seen.jsonl", "a") as file:
            kinds = [part["type"] for part in prompt[-1]["content"]]
            image = prompt[-1]["content"][0]
            line = [kinds, image["path"], image["width"], image["sha256"] == listed[0].key]
            file.write(json.dumps(line) + "\\n")
    return [
        sum(letter in "aeiou" for letter in completion[0]["content"]) + len(name)
        for completion, name in zip(completions, answer)
    ]
'''


def write_rows(folder):
    """Write rows with the same text, whose pictures differ."""
    from PIL import Image

    with open(folder / "train.jsonl", "w") as file:
        for number, color in enumerate(["red", "green", "blue", "gray"]):
            size = (20, 20) if number % 2 else (20, 36)
            Image.new("RGB", size, color).save(folder / f"{number}.png")
            row = {"prompt": "<image>Which?", "images": [f"{number}.png"], "answer": color}
            file.write(json.dumps(row) + "\n")


def run(folder, model, template, name="run", **overrides):
    """Train and return (lines of metrics.jsonl, output folder)."""
    (folder / "template.jinja").write_text(template)
    (folder / "judge.py").write_text(JUDGE)
    model = model.replace("smolvlm.jinja", "template.jinja")
    (folder / "config.toml").write_text((model + RUN).format(folder=folder))
    output = folder / name
    words = [f"{key}={value}" for key, value in overrides.items()]
    command = ["--config", str(folder / "config.toml"), f"run.output_dir={output}", *words]
    assert main(command) == 0
    return list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines())), output


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smolvlm(tmp_path_factory):
    """(lines of metrics.jsonl, output folder) of a run, beside its rows."""
    folder = tmp_path_factory.mktemp("smolvlm")
    write_rows(folder)
    return run(folder, SMOLVLM, TEMPLATE)


def check_run(lines, output):
    """Require the sampler's log-probs to be the trainer's, as they are for the same pixels, places
    and rotations; and rewards to get the parts of messages."""
    folder = output.parent
    gaps = [line[GAP] for line in lines if GAP in line]
    assert gaps and max(gaps) < 1e-4, gaps
    seen = [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]
    assert all(
        kinds == ["image", "text"] and width == 20 and same for kinds, _, width, same in seen
    )
    assert {path for _, path, *_ in seen} == {str(folder / f"{n}.png") for n in range(4)}
    samples = list(map(json.loads, (output / "samples.jsonl").read_text().splitlines()))
    assert any("set" in line for line in samples), "an evaluation set is answered"
    for line in samples:
        image, text = line["prompt"][-1]["content"]
        assert text == {"type": "text", "text": "Which?"}
        assert line["thumbnails"][image["sha256"]].startswith("data:image/jpeg;base64,")


def test_a_run_draws_answers_to_pictures(smolvlm):
    check_run(*smolvlm)


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_vl",
        pytest.param("qwen2_5_vl", marks=pytest.mark.thorough),
        pytest.param("gemma3", marks=pytest.mark.thorough),
        pytest.param("gemma4_per_layer", marks=pytest.mark.thorough),
    ],
)
def test_a_run_of_a_folder_draws_answers_to_pictures(name, tmp_path):
    template, tokens, _ = FOLDERS[name]
    save_start(tmp_path / "start", name)
    write_rows(tmp_path)
    model = FOLDER.replace("{tokens}", json.dumps(tokens))
    check_run(*run(tmp_path, model, template))


WALK = '''
from pathlib import Path


def picture(name):
    return {"type": "image", "image": (Path(__file__).parent / f"{name}.png").read_bytes()}


async def walk(row, chat):
    """Show a picture after every action: by the number of letters, and the first one again."""
    chat.say(row["prompt"])
    for turn in range(3):
        answer = await chat.draw()
        chat.reward(sum(letter in "aeiou" for letter in answer))
        shown = picture(len(answer) % 4) if turn == 1 else picture(row["answer"])
        chat.say([{"type": "text", "text": "Now:"}, shown])
    await chat.draw()
    return 0.0
'''


@pytest.mark.parametrize(
    "history", ["tokens", pytest.param("template", marks=pytest.mark.thorough)]
)
def test_an_environment_shows_a_picture_after_every_action(history, tmp_path):
    """Each token has the log-prob in the trainer's rows, several sequences in a tree with pictures
    in common, that it had when it was drawn behind its own history."""
    write_rows(tmp_path)
    rows = [{"prompt": "Go.", "answer": str(number)} for number in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "walk.py").write_text(WALK)
    env = f"""
[env]
kind = "{tmp_path}/walk.py:walk"
history = "{history}"
"""
    (tmp_path / "smolvlm.jinja").write_text(TEMPLATE)
    (tmp_path / "config.toml").write_text((SMOLVLM + WALKING).format(folder=tmp_path) + env)
    output = tmp_path / "run"
    assert main(["--config", str(tmp_path / "config.toml"), f"run.output_dir={output}"]) == 0
    lines = list(map(json.loads, (output / "metrics.jsonl").read_text().splitlines()))
    gaps = [line[GAP] for line in lines if GAP in line]
    assert gaps and max(gaps) < 1e-4, gaps
    samples = list(map(json.loads, (output / "samples.jsonl").read_text().splitlines()))
    shown = [message["content"] for message in samples[0]["completion"][1::2]]
    assert all([part["type"] for part in parts] == ["text", "image"] for parts in shown)


def test_verbs_answer_and_score_prompts_with_pictures(smolvlm, capsys):
    _, output = smolvlm
    folder = output.parent
    options = ["sampling.temperature=0", "sampling.max_new_tokens=5", "model.compute_dtype=float32"]

    def generate(*words):
        capsys.readouterr()
        code = main(["generate", str(output / "model"), *options, *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    answers = folder / "answers.jsonl"
    rows = ["--input", str(folder / "train.jsonl"), "--output", str(answers)]
    code, _, error = generate(*rows, "--messages")
    assert code == 0, error
    lines = list(map(json.loads, answers.read_text().splitlines()))
    assert len(lines) == 4
    for number, line in enumerate(lines):
        user, answer = line["messages"]
        path = str(folder / f"{number}.png")
        assert user["content"] == [
            {"type": "image", "path": path},
            {"type": "text", "text": "Which?"},
        ]
        code, out, _ = generate("--prompt", "Which?", "--image", path)
        assert code == 0 and ">>> [image 20x" in out
        assert out.split("Which?\n")[1] == f"{escape_control_chars(answer['content'])}\n\n"
    code, _, error = generate("--prompt", "Which?", "--image", str(folder / "none.png"))
    assert code == 2 and "an image is absent" in error

    scored = folder / "scored.jsonl"
    command = [
        "score",
        str(output / "model"),
        str(answers),
        "--top-k",
        "3",
        "--output",
        str(scored),
    ]
    assert main([*command, "model.compute_dtype=float32"]) == 0
    tops = [json.loads(line)["target_logprobs"] for line in scored.read_text().splitlines()]
    # The pictures of rows 0 and 2 have the same size and so the same tokens.
    assert len(tops) == 4 and tops[0][0] != tops[2][0]


def test_a_server_answers_messages_with_data_urls(smolvlm):
    from jaxtrain.api import Model

    _, output = smolvlm
    model = Model(str(output / "model"), ["model.compute_dtype=float32"])
    engine = LocalEngine(model.sampler(True))

    def ask(server, url, **body):
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": "Which?"},
        ]
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "temperature": 0, "max_tokens": 5, "logprobs": True, **body}
        return server.post("/v1/chat/completions", **body)

    def read(number):
        data = (output.parent / f"{number}.png").read_bytes()
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"

    with serving(model.tokenizer, engine, vocab_size=model.vocab_size, max_model_len=100) as server:
        replies = [ask(server, read(number)) for number in (0, 2, 0)]
        assert [status for status, _ in replies] == [200] * 3
        first, second, again = ([c["logprobs"] for c in body["choices"]] for _, body in replies)
        assert first == again != second
        likely = ask(server, read(0), top_logprobs=2)[1]["choices"][0]["logprobs"]["content"]
        assert [t["logprob"] for t in likely] == [t["logprob"] for t in first[0]["content"]]
        for best in likely:
            gaps = [abs(t["logprob"] - best["logprob"]) for t in best["top_logprobs"]]
            assert min(gaps) < 1e-4
        for url, problem in {
            "http://example.org/x.png": "hosts in image_hosts",
            "data:image/png;base64,AAAA": "an image is none of PNG",
            "data:image/png,AAAA": "not in base64",
            "/etc/passwd": "an image",
        }.items():
            status, body = ask(server, url)
            assert status == 400 and problem in body["error"]["message"], body
        status, body = server.post("/v1/completions", prompt=[model.tokenizer.image_format.token])
        assert status == 400 and "without one" in body["error"]["message"], body
        status, body = server.post(
            "/tokenize", messages=[{"role": "user", "content": [{"type": "image"}]}]
        )
        assert status == 400 and "holds no image" in body["error"]["message"], body
