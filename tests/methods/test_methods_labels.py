"""Groups as batches: a tree is its flat rows for loss and gradient, and averages are what they say.

In float64 the two packings differ by the order of sums alone: 1e-10 relative, as for trees
elsewhere; a mask wrong in one pair would show at 1e-3.
"""

import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxtrain.batch import IMAGE_SLOT, Images, check_batch
from jaxtrain.config import validate_config
from jaxtrain.core.step import denominator
from jaxtrain.core.task import Round
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Image, PlacedImages
from jaxtrain.generation.episode_codec import pack, unpack
from jaxtrain.generation.episodes import Episode, Group, TokenSequence
from jaxtrain.generation.reward_table import turn_tables
from jaxtrain.methods.rl.advantages import AdvantageOptions, RewardTable
from jaxtrain.methods.rl.batch_builder import EPISODE, TURN, BatchBuilder, build_batches
from jaxtrain.methods.rl.config import OBJECTIVES, RLTask
from jaxtrain.methods.rl.loss import PolicyObjective, policy_loss
from jaxtrain.methods.rl.method import PolicyPreparation
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

VOCABULARY = 31
ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


def make_episode(rng, prompt, turns=1, finish="stop"):
    """Turns of drawn tokens with a tool's tokens in between."""
    tokens, sampled = list(prompt), [False] * len(prompt)
    for turn in range(turns):
        if turn:
            tokens += rng.integers(0, VOCABULARY, 2).tolist()
            sampled += [False, False]
        count = int(rng.integers(1, 5))
        tokens += rng.integers(0, VOCABULARY, count).tolist()
        sampled += [True] * count
    logprobs = [float(rng.normal(-2, 0.3)) if s else 0.0 for s in sampled]
    versions = [0 if s else -1 for s in sampled]
    return Episode(tokens, sampled, logprobs, versions, finish)


def make_rewritten(rng, prompt, turns=3):
    """A conversation whose template drops the thought of a turn once the next one is asked for."""
    history, sequences = list(prompt), []
    for turn in range(turns):
        thought, answer, question = (
            rng.integers(0, VOCABULARY, int(rng.integers(1, 4))).tolist() for _ in range(3)
        )
        drawn, start = [*thought, *answer], len(history)
        sequences.append(
            TokenSequence(
                [*history, *drawn],
                [False] * start + [True] * len(drawn),
                [0.0] * start + rng.normal(-2, 0.3, len(drawn)).tolist(),
                [-1] * start + [0] * len(drawn),
                [-1] * start + [turn] * len(drawn),
            )
        )
        history += answer + question
    *earlier, last = sequences
    return Episode(
        last.tokens,
        last.sampled,
        last.logprobs,
        last.versions,
        "stop",
        turns=last.turns,
        earlier=earlier,
    )


def make_rewritten_groups(turn_advantages=False):
    rng = np.random.default_rng(5)
    groups = []
    for draw, size in enumerate((3, 2)):
        prompt = rng.integers(0, VOCABULARY, 4).tolist()
        episodes = [make_rewritten(rng, prompt, turns=1 + i) for i in range(size)]
        groups.append(Group(draw, {}, episodes, [{} for _ in episodes]))
        groups[-1].advantages = rng.normal(size=(size, 3) if turn_advantages else size)
    return groups


def make_groups(seed=0, sizes=(4, 3, 2)):
    rng = np.random.default_rng(seed)
    groups = []
    for draw, size in enumerate(sizes):
        prompt = rng.integers(0, VOCABULARY, int(rng.integers(2, 6))).tolist()
        episodes = [make_episode(rng, prompt, turns=1 + i % 2) for i in range(size)]
        if size > 3:  # two answers that begin, or are, the same
            episodes[1] = episodes[0]
        group = Group(draw, {}, episodes, [{} for _ in episodes])
        group.advantages = rng.normal(size=size)
        groups.append(group)
    return groups


def make_labels(**changes):
    shape = StepShape(changes.pop("rows", 2), None, changes.pop("row_tokens", 40))
    options = {"average": "token", "dtype": np.float64, "components": ("pg", "kl")}
    return BatchBuilder(shape, **{**options, **changes})


@functools.cache
def start():
    with jax.enable_x64(True):
        model = build.init(
            families.config_from_hf(ARCHITECTURE), 0, param_dtype="float64", dtype="float64"
        )
        return split_model(model)


def loss_and_gradient(labeled, objective):
    params, rebuild = start()

    def total(params, batch, denoms):
        sums, _ = policy_loss(rebuild(params), batch, objective, "reference")
        return sums["pg"] / denoms["pg"] + 0.1 * sums["kl"] / denoms["kl"]

    grad = jax.jit(jax.value_and_grad(total))
    (batch,) = labeled.batches
    denoms = {name: denominator(batch, name) for name in ("pg", "kl")}
    actual = [
        grad(params, jax.tree.map(lambda leaf, a=a: leaf[a], batch), denoms)
        for a in range(len(batch.tokens))
    ]
    return functools.reduce(lambda x, y: jax.tree.map(np.add, x, y), actual)


@pytest.mark.parametrize(
    ("average", "make"),
    [
        pytest.param("token", make_groups, marks=pytest.mark.slow),
        pytest.param("sequence", make_groups, marks=pytest.mark.thorough),
        pytest.param("constant", make_groups, marks=pytest.mark.thorough),
        pytest.param("sequence", make_rewritten_groups, marks=pytest.mark.slow),
    ],
)
def test_a_group_tree_is_its_flat_rows(average, make):
    """Loss and gradients; answers that are equal stay two branches."""
    objective = PolicyObjective(
        ratio="sequence" if average == "sequence" else "token",
        kl="k3",
        correction="token_truncate",
        off_policy_threshold=0.5,
    )
    with jax.enable_x64(True):
        actual = [
            loss_and_gradient(
                build_batches(make(), make_labels(average=average, share_prompts=share, longest=9)),
                objective,
            )
            for share in (True, False)
        ]
    (tree_loss, tree_slope), (flat_loss, flat_slope) = actual
    np.testing.assert_allclose(tree_loss, flat_loss, rtol=1e-10)
    for path, value in tree_slope.items():
        size = np.abs(flat_slope[path]).max()
        assert size > 0, f"{path} has no gradient, so this test says nothing of it"
        np.testing.assert_allclose(value, flat_slope[path], atol=1e-10 * size, err_msg=path)


def test_every_drawn_token_trains_once_and_nothing_else():
    groups = make_groups()
    for share in (True, False):
        labeled = build_batches(groups, make_labels(share_prompts=share))
        for batch in labeled.batches:
            check_batch(batch)
        drawn = sum(e.num_sampled for group in groups for e in group.episodes)
        assert labeled.trained_tokens == drawn
        (batch,) = labeled.batches
        mask = batch.weights["pg"] != 0
        counts = np.bincount(batch.streams[EPISODE][mask])
        assert counts.tolist() == [e.num_sampled for g in groups for e in g.episodes]
        # An episode's tokens have one owner in one row, and its advantage.
        advantages = np.concatenate([group.advantages for group in groups])
        places = batch.streams[EPISODE][mask]
        np.testing.assert_allclose(batch.streams["advantage"][mask], advantages[places], rtol=1e-6)


@pytest.mark.parametrize("share", [True, False])
def test_a_rewritten_history_trains_each_drawn_token_where_it_was_drawn(share):
    """With the log-prob that it was drawn with, the advantage of its episode's turn, and episodes
    that count alike in a mean of sequences, however many sequences they have."""
    groups = make_rewritten_groups(turn_advantages=True)
    labeled = build_batches(groups, make_labels(share_prompts=share, average="sequence"))
    (batch,) = labeled.batches
    check_batch(batch)
    mask = batch.weights["pg"] != 0
    actual = sorted(
        zip(
            *(batch.streams[name][mask].tolist() for name in (EPISODE, TURN)),
            batch.tokens[mask].tolist(),
            batch.streams["sampler_logp"][mask].round(4).tolist(),
            batch.streams["advantage"][mask].round(4).tolist(),
            strict=True,
        )
    )
    expected, number = [], 0
    for group in groups:
        for episode, advantages in zip(group.episodes, group.advantages, strict=True):
            for sequence in episode.sequences:
                expected += [
                    (number, turn, token, logprob, advantages[turn])
                    for token, drawn, logprob, turn in zip(
                        sequence.tokens,
                        sequence.sampled,
                        sequence.logprobs,
                        sequence.turns,
                        strict=True,
                    )
                    if drawn
                ]
            number += 1
    assert len(actual) == len(expected) == labeled.trained_tokens
    np.testing.assert_allclose(actual, sorted(expected), atol=1e-3)
    weights = np.bincount(batch.streams[EPISODE][mask], batch.weights["pg"][mask])
    np.testing.assert_allclose(weights, np.ones(number), rtol=1e-6)
    # The questions and kept answers that two sequences show are computed once.
    saved = labeled.saving.saved_tokens
    prompts = sum(4 * (sum(len(e.sequences) for e in g.episodes) - 1) for g in groups)
    assert saved > prompts if share else saved == 0
    short = max(len(sequence.tokens) for e in groups[0].episodes[:2] for sequence in e.sequences)
    cut = build_batches(groups, make_labels(row_tokens=short))
    assert cut.too_long == sum(
        any(len(sequence.tokens) > short for sequence in e.sequences)
        for g in groups
        for e in g.episodes
    )


def test_the_tokens_saved_are_the_shared_prompts():
    groups = make_groups()
    saving = build_batches(groups, make_labels()).saving
    flat = sum(len(e.tokens) for group in groups for e in group.episodes)
    prompts = [
        (len(g.episodes) - 1) * next(i for i, s in enumerate(g.episodes[0].sampled) if s)
        for g in groups
    ]
    assert saving.flat_tokens == flat
    assert saving.saved_tokens == sum(prompts)
    assert build_batches(groups, make_labels(share_prompts=False)).saving.saved_tokens == 0


def test_a_group_larger_than_a_row_is_cut_into_several_trees():
    rng = np.random.default_rng(0)
    episodes = [make_episode(rng, range(10)) for _ in range(12)]
    group = Group(0, {}, episodes, [{} for _ in episodes], advantages=np.ones(12))
    labeled = build_batches([group], make_labels(row_tokens=24))
    assert labeled.trained_tokens == sum(e.num_sampled for e in episodes)
    assert labeled.batches[0].tokens.shape[0] * 2 > 1
    long = make_episode(rng, range(25))
    group = Group(0, {}, [*episodes, long], [{} for _ in range(13)], advantages=np.ones(13))
    assert build_batches([group], make_labels(row_tokens=24)).too_long == 1


def weigh(average, **changes):
    """{episode: sum of its weights / denominator} of one group of three."""
    rng = np.random.default_rng(1)
    episodes = [make_episode(rng, [1, 2], finish=f) for f in ("stop", "length", "stop")]
    group = Group(0, {}, episodes, [{}, {}, {}], advantages=np.ones(3))
    labeled = build_batches([group], make_labels(average=average, **changes))
    (batch,) = labeled.batches
    mask = batch.weights["pg"] != 0
    share = batch.weights["pg"][mask] / float(denominator(batch, "pg"))
    counts = [e.num_sampled for e in episodes]
    return np.bincount(batch.streams[EPISODE][mask], share, minlength=3), counts


def test_averages_by_hand():
    with jax.enable_x64(True):
        actual, counts = weigh("token")
        np.testing.assert_allclose(actual, np.array(counts) / sum(counts))
        np.testing.assert_allclose(weigh("sequence")[0], [1 / 3] * 3)
        np.testing.assert_allclose(weigh("constant", longest=7)[0], np.array(counts) / (3 * 7))
        # One microstep: the same as over tokens.
        np.testing.assert_allclose(weigh("microstep")[0], np.array(counts) / sum(counts))


def test_masked_truncated_answers_still_count_in_the_mean_of_sequences():
    with jax.enable_x64(True):
        np.testing.assert_allclose(weigh("sequence", mask_truncated=True)[0], [1 / 3, 0, 1 / 3])
        actual, counts = weigh("token", mask_truncated=True)
        retained = counts[0] + counts[2]
        np.testing.assert_allclose(actual, [counts[0] / retained, 0, counts[2] / retained])


def test_microsteps_weigh_alike_whatever_their_tokens():
    groups = make_groups(sizes=(4, 4, 4, 2))
    labeled = build_batches(groups, make_labels(average="microstep", rows=1, row_tokens=32))
    (batch,) = labeled.batches
    assert len(batch.tokens) > 1
    sums = batch.weights["pg"].sum((1, 2))
    np.testing.assert_allclose(sums[sums > 0], 1.0)
    assert batch.denoms["pg"].tolist() == [np.count_nonzero(sums)] * len(batch.tokens)


def test_luspo_sums_tokens_and_divides_by_sequences():
    groups = make_groups(sizes=(2, 2))
    (batch,) = build_batches(groups, make_labels(average="sum")).batches
    assert set(np.unique(batch.weights["pg"])) == {0.0, 1.0}
    assert set(batch.denoms["pg"].tolist()) == {4.0}


def test_minibatches_divide_the_groups():
    groups = make_groups(sizes=(2, 2, 2, 2))
    labeled = build_batches(groups, make_labels(num_minibatches=2))
    seen = [set(b.streams[EPISODE][b.weights["pg"] != 0].tolist()) for b in labeled.batches]
    assert seen == [{0, 1, 2, 3}, {4, 5, 6, 7}]


def test_every_objective_sets_every_knob():
    knobs = set(OBJECTIVES["grpo"])
    assert all(set(preset) == knobs for preset in OBJECTIVES.values())
    task = RLTask(objective="dr_grpo", scale_rewards="batch")
    assert (task.resolved("average"), task.resolved("scale_rewards")) == ("constant", "batch")


def make_config(task, **sections):
    """Return the config of a run of one step that samples at temperature 1."""
    table = {"run": {"max_steps": 1}, "model": {"path": "x"}, "env": {"kind": "calculator"}}
    table |= {"data": {"datasets": [{"path": "x"}]}, "sampling": {"temperature": 1.0}}
    return validate_config({**table, "task": task, **sections}, "test")


def test_a_penalty_of_the_episode_comes_off_every_turn():
    """KL in the reward with rewarded turns: each token's advantage is that of its turn, from what
    was still to come less beta times the episode's sum of old - reference."""
    groups = make_rewritten_groups(turn_advantages=True)
    rng = np.random.default_rng(2)
    for group in groups:
        for episode in group.episodes:
            episode.turn_rewards = [{"step": float(v)} for v in rng.normal(size=3)]
        group.rewards = [episode.all_rewards for episode in group.episodes]
    (batch,) = build_batches(groups, make_labels()).batches
    mask = batch.weights["pg"] != 0
    streams = {**batch.streams, "old_logp": rng.normal(size=mask.shape)}
    streams["ref_logp"] = rng.normal(size=mask.shape)
    batch = batch._replace(streams=streams)
    sizes = tuple(len(group.episodes) for group in groups)
    tables = turn_tables(groups, ["step"])
    rounds = SimpleNamespace(table=RewardTable(tables, (1.0,), sizes))
    plan = SimpleNamespace(advantages=AdvantageOptions("leave_one_out", "none"))
    config = make_config({"kind": "rl", "objective": "rloo", "beta": 0.5})
    preparation = PolicyPreparation(config.task, config, SimpleNamespace(rounds=rounds, plan=plan))
    (changed,), metrics = preparation.reward([batch], in_reward=True)
    mean = metrics["kl"]
    gap = np.where(mask, streams["old_logp"] - streams["ref_logp"], 0.0)
    kl_N = np.bincount(streams[EPISODE][mask], gap[mask])
    assert mean == pytest.approx(kl_N.mean())
    for turn, table in enumerate(tables):
        totals = table[:, 0] - 0.5 * kl_N
        first = [t - (totals[:3].sum() - t) / 2 for t in totals[:3]]
        second = [totals[3] - totals[4], totals[4] - totals[3]]
        local_result = mask & (streams[TURN] == turn)
        expected = np.array([*first, *second])[streams[EPISODE][local_result]]
        np.testing.assert_allclose(changed.streams["advantage"][local_result], expected, rtol=1e-5)


def test_sampler_and_trainer_are_compared_on_rounds_that_a_resumed_run_compares_on():
    """And on the first after a start, which then counts in the log alone."""
    config = make_config({"kind": "rl", "objective": "grpo", "beta": 0.0})
    (batch,) = build_batches(make_groups(), make_labels()).batches
    output = []

    def looks(first, last):
        source = SimpleNamespace(metrics={"lag/max": 0})
        data = SimpleNamespace(rounds=source, log=output.append)
        preparation = PolicyPreparation(config.task, config, data)
        scored = []

        def score(batch, *_, **__):
            scored.append(batch)
            return np.asarray(batch.streams["sampler_logp"])

        scorer = SimpleNamespace(logp=score)
        messages = []
        for version in range(first, last):
            before = len(scored)
            actual = preparation(Round([batch], version=version), scorer)
            messages.append(("mismatch/kl" in actual.metrics, len(scored) > before))
        return messages

    full = looks(0, 45)
    assert [version for version, (messages, _) in enumerate(full) if messages] == [0, 20, 40]
    resumed = looks(7, 45)
    assert [messages for messages, _ in resumed] == [messages for messages, _ in full[7:]]
    assert resumed[0][1] and not resumed[1][1]


def test_the_replay_buffer_of_a_checkpoint_keeps_sequences_and_rewards_of_turns():
    (group, _) = make_rewritten_groups()
    group.dataset = 1
    for episode in group.episodes:
        episode.turn_rewards, episode.rewards = [{"step": 0.5}, {}, {}], {"goal": None}
    again = unpack(json.loads(json.dumps(pack(group))))
    assert again.dataset == 1
    for actual, expected in zip(again.episodes, group.episodes, strict=True):
        assert list(map(vars, actual.sequences)) == list(map(vars, expected.sequences))
        assert (actual.rewards, actual.turn_rewards) == (expected.rewards, expected.turn_rewards)


class Blank:
    """Stand-in for `packing.pack.ImagePacker`: pictures without content, 8 patches a row."""

    row_patches = 8

    def __init__(self):
        self.rows = []

    def bucket(self, rows):
        return 8 if any(row is not None for row in rows) else 0

    def pack(self, rows, num_patches):
        self.rows += [[image.key for image in row.images] if row else [] for row in rows]
        shape = (len(rows), num_patches)
        pairs = np.zeros((*shape, 2), np.int32)
        index = np.broadcast_to(np.arange(num_patches, dtype=np.int32), shape)
        pixels, values = np.zeros((*shape, 3), np.uint8), np.zeros((len(rows), 256, 3), np.float32)
        return Images(pixels, index, index + 1, pairs, pairs + 1, values)


def test_rows_have_room_for_the_patches_of_their_groups():
    """Tokens of all groups fit one row. Pictures that do not fit any are left out and counted;
    members of a group with pictures of their own, and other groups, take further rows."""
    rng = np.random.default_rng(0)

    def play(key, patches):
        episode = make_episode(rng, [1, 2, 30, 30, 3])
        slot = np.array([-1, -1, 0, 1, -1], np.int32)
        episode.images = PlacedImages((Image(key, (4, 4), patches, 2, b""),), slot)
        return episode

    groups = [
        [play("a", 6), play("a", 6), play("b", 6), play("c", 9)],
        [play("d", 6), play("d", 6)],
        [make_episode(rng, [1, 2])],
    ]
    groups = [
        Group(draw, {}, episodes, [{} for _ in episodes], rng.normal(size=len(episodes)))
        for draw, episodes in enumerate(groups)
    ]
    images = Blank()
    built = build_batches(groups, BatchBuilder(StepShape(1, None, 64), "token", images=images))
    assert built.too_long == 1
    assert sorted(key for row in images.rows for key in row) == ["a", "b", "d"]
    assert max(map(len, images.rows)) == 1
    [batch] = built.batches
    # A picture that members share stands once in its row: two tokens each.
    assert (batch.streams[IMAGE_SLOT] >= 0).sum(-1).max() == 2
    played = sum(len(group.episodes) for group in groups) - 1
    assert len({*batch.streams[EPISODE].ravel().tolist()} - {-1}) == played


def test_replayed_groups_may_count_as_drawn_by_the_weights_that_meet_them():
    """Their log-probs alone are replaced, before the first update, and not compared."""
    groups = make_groups()
    groups[0].replayed = True
    rollout = {"replay_size": 4, "replay_logp": "recomputed"}
    config = make_config({"kind": "rl", "objective": "m2po_clip"}, rollout=rollout)
    (as_drawn,) = build_batches(groups, make_labels()).batches
    (batch,) = build_batches(groups, make_labels(recompute_replayed=True)).batches
    drawn = np.isnan(batch.streams["sampler_logp"])
    replayed = len(groups[0].episodes)
    trained = batch.weights["pg"] != 0
    np.testing.assert_array_equal(drawn, trained & (batch.streams[EPISODE] < replayed))
    assert drawn.any() and (batch.weights["pg"][~drawn] != 0).any()
    data = SimpleNamespace(rounds=SimpleNamespace(metrics={"lag/max": 1}), log=print)
    preparation = PolicyPreparation(config.task, config, data)
    policy_logp = np.full(drawn.shape, -2.5, np.float32)
    scorer = SimpleNamespace(logp=lambda *_, **__: policy_logp)
    prepared = preparation(Round([batch], version=3), scorer)
    sampler_logp = prepared.batches[0].streams["sampler_logp"]
    np.testing.assert_array_equal(sampler_logp[drawn], -2.5)
    np.testing.assert_array_equal(sampler_logp[~drawn], as_drawn.streams["sampler_logp"][~drawn])
    np.testing.assert_array_equal(prepared.batches[0].streams["old_logp"], sampler_logp)
