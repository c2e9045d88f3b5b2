"""Structured EBFT: what a round's answers are worth, what trains, and whole runs."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.core.roles import Roles
from jaxtrain.core.scorer import POOLING
from jaxtrain.core.task import Round
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.main import main
from jaxtrain.methods.ebft.feature_matching import rewards
from jaxtrain.methods.ebft.loss import ebft_loss
from jaxtrain.methods.ebft.method import FeatureMatchingPreparation, make
from jaxtrain.methods.rl.advantages import AdvantageOptions, RewardTable
from jaxtrain.methods.rl.batch_builder import BatchBuilder, build_batches
from jaxtrain.methods.rl.loss import PolicyObjective
from tests.docs.metric_names import require_rows

CONFIG = """
[run]
max_steps = 4
export = false
[data]
sequence_len = 64
shuffle = false
[task]
kind = "ebft"
ce_coef = 0.5
adaptive_min_tokens = 2
[rollout]
prompts_per_step = 2
group_size = 3
samples = "all"
[sampling]
temperature = 0.7
max_new_tokens = 6
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ebft")
    rows = [{"prompt": f"say {n}", "ground_truth": f"{n} {n}"} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text(MODEL + CONFIG)
    return folder


def load(folder, *words):
    data = f'data.datasets=[{{ path = "{folder / "rows.jsonl"}" }}]'
    return load_config(str(folder / "config.toml"), [data, *words])


def episode(prompt, answer, provided=False):
    tokens, drawn = [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)
    nothing = [0.0] * len(tokens)
    return Episode(tokens, drawn, nothing, [0] * len(tokens), "stop", given=provided)


def draw_groups():
    """Two prompts with three answers each, of which the first is the truth."""
    rng = np.random.default_rng(0)
    groups = []
    for draw in range(2):
        prompt = rng.integers(10, 99, 4 + draw).tolist()
        answers = [rng.integers(10, 99, n).tolist() for n in (3, 5, 2)]
        truth = episode(prompt, answers[0], provided=True)
        episodes = [episode(prompt, answer) for answer in answers]
        groups.append(Group(draw, {}, episodes, [{} for _ in answers], truth=truth))
    return groups


class Features:
    """A scorer whose feature of a sequence is a random vector for its tokens' sum."""

    def __init__(self, width=8):
        self.table = np.random.default_rng(1).normal(size=(10_000, width)).astype(np.float32)
        self.asked = 0

    def features(self, batch, role, layers, places):
        on_path_ABTS = batch.streams[POOLING] != 0
        sums_ABS = np.einsum("abts,abt->abs", on_path_ABTS.astype(int), batch.tokens)
        self.asked += int((sums_ABS > 0).sum())
        return self.table[sums_ABS % 10_000]


def prepare(folder, groups, *words):
    task = make(load(folder, "task.features.pooling=mean_pooling", *words))
    matching = task.prepare
    assert isinstance(matching, FeatureMatchingPreparation)
    source = SimpleNamespace(
        groups=groups,
        table=RewardTable([np.zeros((6, 0))], (), (3, 3)),
        last_part=True,
        choose_samples=lambda: [group.rewards for group in groups],
    )
    plan = matching.data.plan
    matching.data.plan = dataclasses.replace(plan, advantages=AdvantageOptions("group", "none"))
    matching.data.rounds = source
    return matching, source


def test_answers_earn_by_their_features_and_truths_are_asked_once(folder):
    groups, scorer = draw_groups(), Features()
    matching, source = prepare(folder, groups, "task.features.alignment_coef=0.7")
    matching.reward_answers(scorer)
    assert scorer.asked == 8 and matching.numbers["ebft/cached_truths"] == 0
    feature = lambda entry: scorer.table[sum(entry.tokens)]  # noqa: E731
    expected = rewards(
        jnp.stack([jnp.stack([feature(e) for e in group.episodes]) for group in groups]),
        jnp.stack([feature(group.truth) for group in groups]),
        alignment=0.7,
    )
    np.testing.assert_allclose(matching.rewards_N, expected.rewards.reshape(-1), atol=1e-6)
    np.testing.assert_allclose(expected.alignment[:, 0], 2.0, atol=1e-5)
    first = matching.numbers
    matching.reward_answers(scorer)
    assert scorer.asked == 14 and matching.numbers["ebft/cached_truths"] == 1
    assert matching.numbers["ebft/reward"] == pytest.approx(first["ebft/reward"])
    table, metrics = matching.judge(source.table, [])
    assert metrics["reward"] == pytest.approx(first["ebft/reward"])
    np.testing.assert_allclose(table.rewards_TNK[0][:, -1], matching.rewards_N)
    # Samples are chosen by what is known only now.
    assert source.samples[0][0] == {"features": pytest.approx(matching.rewards_N[0])}


def test_features_that_are_no_numbers_end_the_run(folder):
    matching, _ = prepare(folder, draw_groups())
    scorer = Features()
    scorer.table[:] = np.nan
    with pytest.raises(RunStopped, match="not finite"):
        matching.reward_answers(scorer)


def test_a_turns_end_is_no_part_of_what_is_compared(folder):
    """Answers that were cut off have none: their last token is one of the text."""
    matching, _ = prepare(folder, draw_groups())
    end = next(iter(matching.ends))
    full, cut = episode([5, 6], [7, 8, end]), episode([5, 6], [7, 8])
    assert (
        matching.read_sequence(full).tokens.tolist() == matching.read_sequence(cut).tokens.tolist()
    )
    assert matching.read_sequence(full).prompt == 2


class Bigrams:
    """A model whose logits of the next token are a table's row of the last one."""

    logit_softcap = None
    never_drawn = ()

    def __init__(self, table):
        self.table = table

    def hidden(self, batch):
        return SimpleNamespace(hidden=jax.nn.one_hot(batch.tokens, len(self.table)))

    def head(self):
        return self.table.T


def test_cross_entropy_of_the_truth_is_really_trained():
    """At temperature 1, a mean over its tokens, with a gradient; and answers are not in it."""
    groups = draw_groups()
    for group in groups:
        group.advantages = np.ones((3, 1))
    labels = BatchBuilder(StepShape(1, None, 64), "sequence", truth="ce")
    batch = jax.tree.map(lambda x: x[0], build_batches(groups, labels).batches[0])
    assert float((batch.weights["ce"] != 0).sum()) == 6  # twice the three tokens of a truth
    assert not np.any((batch.weights["ce"] != 0) & (batch.weights["pg"] != 0))
    table = jnp.asarray(np.random.default_rng(2).normal(size=(100, 100)), jnp.float32)

    def total(table, temperature):
        objective = PolicyObjective(own_old=True, temperature=temperature)
        sums, metrics = ebft_loss(Bigrams(table), batch, objective, "xla")
        return sums["ce"], metrics["ebft/ce_loss"]

    differentiate = jax.jit(jax.value_and_grad(total, has_aux=True), static_argnums=1)
    expected, logp = 0.0, np.asarray(jax.nn.log_softmax(table, axis=-1))
    for group in groups:
        tokens = group.truth.tokens
        expected -= sum(float(logp[a, b]) for a, b in zip(tokens[-4:], tokens[-3:], strict=False))
    (actual, (sum_, weight)), gradient = differentiate(table, 0.5)
    assert float(actual) == pytest.approx(expected, rel=1e-5) and float(weight) == 6
    assert float(sum_) == pytest.approx(expected, rel=1e-5)
    assert float(jnp.abs(gradient).max()) > 0.1
    # Without the component there is no such branch.
    bare = build_batches(groups, BatchBuilder(StepShape(1, None, 64), "sequence")).batches[0]
    assert "ce" not in bare.weights and (bare.prev >= 0).sum() < (batch.prev >= 0).sum()


@pytest.mark.parametrize(
    ("words", "output"),
    [
        (["env.kind=calculator"], "env.kind"),
        (["env.kind=dialogue", "task.turns=all"], "task.turns"),
        (["task.features.network=bare"], "adapter.kind"),
        (["task.features.layers=[0]"], "task.features.layers"),
        (["task.features.layers=[1.5]"], "up to 1.0"),
        (["rollout.replay_size=4"], "replay_size"),
        (["task.adaptive_max_tokens=false"], "adaptive_min_tokens"),
        (["task.features.alignment_coef=0", "task.features.diversity_coef=0"], "both 0"),
    ],
)
def test_what_cannot_be_is_told(folder, words, output):
    with pytest.raises(UserError, match=output):
        load(folder, *words)


def test_a_layer_that_is_not_there_is_told_before_weights_are_read(folder):
    with pytest.raises(UserError, match="has 3, but the feature network has 1 layers"):
        make(load(folder, "task.features.layers=[3]"))


@pytest.mark.slow
def test_the_network_is_a_frozen_copy_in_bfloat16_that_no_checkpoint_holds(folder):
    task = make(load(folder))
    roles = Roles(task.roles)
    trained, frozen, copies = roles.open(0)
    local_value = {path: value for path, value in frozen.items() if path.startswith("features/")}
    assert len(local_value) == len(trained) and not copies
    for path, value in local_value.items():
        start = trained[path.removeprefix("features/")]
        assert value.dtype == jnp.bfloat16 == roles.frozen_shapes[path].dtype
        np.testing.assert_array_equal(value, start.astype(jnp.bfloat16))
    resumed = roles.open(0, trained=False)[1]  # read again, whatever was trained since
    assert all((resumed[path] == value).all() for path, value in local_value.items())
    bare = make(load(folder, "adapter.kind=lora")).roles["features"]
    assert bare.weights == "bare" and not bare.in_loss


def read(folder):
    require_rows(folder)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        [],
        pytest.param(
            [
                "adapter.kind=lora",
                "rollout.mode=async",
                "rollout.devices=2",
                "task.features.whitening=true",
            ],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [
                "task.num_minibatches=2",
                "rollout.streaming=true",
                "rollout.devices=2",
                "env.kind=dialogue",
            ],
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["start", "bare", "streamed"],
)
def test_a_run(folder, tmp_path, words):
    data = f'data.datasets=[{{ path = "{folder / "rows.jsonl"}" }}]'
    renamed = ', fields = { completion = "ground_truth" }, as_chat = true }]'
    held = data.replace("datasets", "eval_datasets").replace(" }]", renamed)
    out = [f"run.output_dir={tmp_path}", "log.plot=false", "eval.at_start=true"]
    arguments = ["--config", str(folder / "config.toml"), data, held, *out, *words]
    assert main(arguments) == 0
    lines = read(tmp_path)
    steps = [line for line in lines if "ebft/reward" in line]
    evals = [line["eval/loss"] for line in lines if "eval/loss" in line]
    assert steps and len(evals) == 2 and evals[1] < evals[0]
    for line in steps:
        assert line["ebft/reward"] == pytest.approx(line["reward"], abs=1e-5)
        assert -2.01 <= line["ebft/alignment"] <= 2.01
    assert steps[0]["ebft/cached_truths"] == 0
    if not words:
        assert [line["ebft/cached_truths"] for line in steps] == [0, 0, 1, 1]
        sample = json.loads((tmp_path / "samples.jsonl").read_text().splitlines()[0])
        assert sample["reward"] == sample["rewards"]["features"] != 0
        # The network waits on the host, and no bit changes.
        host = [f"run.output_dir={tmp_path / 'host'}", "parallel.frozen=host"]
        assert main([*arguments, *host]) == 0
        again = [line for line in read(tmp_path / "host") if "ebft/reward" in line]
        for key in ("loss", "ebft/reward", "ebft/cfm_loss", "grad_norm"):
            assert [line[key] for line in again] == [line[key] for line in steps], key


def test_rounds_without_answers_are_left_alone(folder):
    matching, _ = prepare(folder, draw_groups())
    nothing = Round([])
    assert matching(nothing, Features()) is nothing
