"""Reward models and distillation with images: losses against transformers, and runs.

A tree whose prefix holds an image has two branches, which torch reads one by one."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import torch
import transformers
from smolvlm_text import TEMPLATE
from test_methods_vision import RUN as OFFLINE
from test_methods_vision import SMOLVLM, train, write_rows
from test_methods_vision_rl import RUN as ONLINE
from test_models_families import relative_error
from tiny_vision import VISION, make_batch, processed

from jaxtrain.data.comparisons.pairs import CHOSEN, MARGIN, PREFERENCE, REJECTED
from jaxtrain.main import main
from jaxtrain.methods.distillation.loss import COMPONENT, Distillation, distillation_loss
from jaxtrain.methods.reward_model.loss import pair_loss
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.parameters import split_model
from jaxtrain.models.scores import KNOWN, ScoreHead

pytestmark = pytest.mark.slow


def their_logits(model, name, batch, sequences, images):
    """Logits or scores of each branch by transformers' model."""
    tokens, outputs = np.asarray(batch.tokens), []
    for sequence in sequences:
        ids = tokens[sequence.row, sequence.places]
        inputs = processed(VISION[name], ids, [images[number] for number in sequence.images])
        with torch.no_grad():
            inputs = {key: torch.from_numpy(value) for key, value in inputs.items()}
            outputs.append(model.eval()(use_cache=False, **inputs).logits[0].numpy())
    return outputs


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.thorough)])
def test_pairs_of_answers_to_an_image_are_scored_as_by_transformers(name, tmp_path):
    """The class of transformers reads what is written; the loss is that of its two scores."""
    head = ScoreHead("sequence", ("reward",))
    config = families.with_score(families.config_from_hf(VISION[name]), head)
    saving.save(build.init(config, 3), config, tmp_path)
    (named,) = families.read_config(tmp_path).to_hf()["architectures"]
    assert named in KNOWN
    theirs, report = getattr(transformers, named).from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values()), report

    batch, sequences, images = make_batch(VISION[name])
    weight, chosen, rejected = np.zeros((3, 2, 48))
    weight[1, 15], chosen[1, 15], rejected[1, 15] = 1, 29 - 15, 39 - 15
    streams = {
        CHOSEN: chosen.astype(np.int32),
        REJECTED: rejected.astype(np.int32),
        MARGIN: np.zeros((2, 48), np.float32),
    }
    batch = batch._replace(
        weights={PREFERENCE: weight.astype(np.float32)}, streams={**batch.streams, **streams}
    )
    params, rebuild = split_model(loading.load(tmp_path))

    def run(params):
        model = rebuild(params)
        return pair_loss(model, batch)[0][PREFERENCE], model.scores(model.hidden(batch).hidden)

    loss, scores = jax.jit(run)(params)
    expected = their_logits(theirs, name, batch, sequences, images)
    for sequence, score in zip(sequences, expected, strict=True):
        ours = scores[sequence.row, sequence.places[-1]]
        np.testing.assert_allclose(ours, score, atol=1e-5 * np.abs(score).max() + 1e-6)
    gap = float((expected[1] - expected[2])[0])
    np.testing.assert_allclose(loss, np.log1p(np.exp(-gap)), rtol=1e-4)


@pytest.mark.parametrize("name", ["smolvlm", pytest.param("qwen3_vl", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_a_teacher_reads_the_images_as_transformers_does(name, beta, tmp_path):
    """Reference: both distributions over the vocabulary by transformers, the KL in float64."""
    batch, sequences, images = make_batch(VISION[name])
    batch = batch._replace(weights={COMPONENT: batch.weights["nll"]})
    config = families.config_from_hf(VISION[name])
    models, log_probs = [], []
    for seed in (3, 4):
        model = build.init(config, seed)
        saving.save(model, config, tmp_path / str(seed))
        models.append(split_model(model))
        auto = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / str(seed))
        logits = their_logits(auto, name, batch, sequences, images)
        log_probs.append([log_softmax(np.float64(values)) for values in logits])

    (student, rebuild), (teacher, _) = models

    @jax.jit
    def run(student, teacher):
        sums, _ = distillation_loss(
            rebuild(student), rebuild(teacher), batch, Distillation(beta=beta)
        )
        return sums[COMPONENT]

    expected = 0.0
    for index, sequence in enumerate(sequences):
        q, p = log_probs[0][index], log_probs[1][index]
        kl_n = (np.exp(p) * (p - q)).sum(-1) if beta == 0 else (np.exp(q) * (q - p)).sum(-1)
        # The distribution of token n is that behind token n - 1; shared tokens count once.
        expected += kl_n[max(sequence.seen - 1, 0) : -1].sum()
    assert relative_error(np.array(run(student, teacher)), np.array(expected)) < 1e-5


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_reward_model_scores_answers_by_their_picture_and_judges_a_policy(tmp_path):
    (tmp_path / "smolvlm.jinja").write_text(TEMPLATE)
    config, model = tmp_path / "config.toml", tmp_path / "rm" / "model"
    config.write_text((SMOLVLM + OFFLINE).format(folder=tmp_path, kind="reward_model"))
    # Rows 0 and 3 have the same answers and other pictures, rows 0 and 12 also the same picture.
    write_rows(tmp_path, "reward_model", ["red", "green", "blue", "gray"])
    train(config, tmp_path / "rm")
    output = tmp_path / "scores.jsonl"
    rows = str(tmp_path / "train.jsonl")
    words = ["--output", str(output), "model.compute_dtype=float32"]
    assert main(["score", str(model), rows, *words]) == 0
    scores = [(line["score_chosen"], line["score_rejected"]) for line in read_lines(output)]
    assert len(scores) == 24
    np.testing.assert_allclose(scores[0], scores[12], atol=1e-6)
    assert np.abs(np.subtract(scores[0], scores[3])).max() > 1e-4

    policy = ONLINE.replace("steps = 3", "steps = 1").partition("[[rewards]]")[0]
    config.write_text((SMOLVLM + policy).format(folder=tmp_path))
    words = ["rewards.0.name=rm", f"rewards.0.model.path={model}"]
    words += ["rewards.0.model.compute_dtype=float32", f"run.output_dir={tmp_path / 'rl'}"]
    assert main(["--config", str(config), *words]) == 0
    (line,) = (x for x in read_lines(tmp_path / "rl" / "metrics.jsonl") if "rewards/rm/std" in x)
    assert line["rewards/rm/std"] > 0 and line["reward"] == line["rewards/rm/mean"]


def test_a_student_answers_pictures_itself(tmp_path):
    """Half of the prompts are answered by the data, whose sequences hold the picture, too."""
    (tmp_path / "smolvlm.jinja").write_text(TEMPLATE)
    write_rows(tmp_path, "sft", ["red", "green", "blue"])
    online = (
        ONLINE.partition("[[rewards]]")[0]
        .replace("num_minibatches = 2", "")
        .replace('kind = "rl"', 'kind = "distillation"\non_policy_share = 0.5\nce_weight = 1.0')
    )
    config = tmp_path / "config.toml"
    config.write_text((SMOLVLM + online).format(folder=tmp_path))
    words = ["task.teacher.kind=start", "run.max_steps=2"]
    assert list(train(config, tmp_path / "run", *words)) == [1, 2]
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    shares = [line["own_token_share"] for line in lines if "own_token_share" in line]
    assert shares and any(0 < share < 1 for share in shares), shares
