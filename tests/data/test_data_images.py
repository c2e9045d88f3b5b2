"""Images of rows: every form of a reference to one, refusals, text, places in trees and packed
rows."""

import base64
import pickle
import zlib
from types import SimpleNamespace

import numpy as np
import pytest
from smolvlm_text import ANSWER, draw, make_reader, open_tokenizer

from jaxtrain.batch import IMAGE_SLOT, check_batch
from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.comparisons.pairs import PairTrees
from jaxtrain.data.comparisons.preference_row import SAME
from jaxtrain.data.comparisons.preferences import RankedReader
from jaxtrain.data.images import decode
from jaxtrain.data.images.patches import PatchPacker
from jaxtrain.data.packing.pack import Fields, build_batch, fit_rows, lay_out, stack_batches
from jaxtrain.data.packing.prefixes import FlatSequence, merge_prefixes, share_prefixes
from jaxtrain.data.packing.steps import StepShape, count_images
from jaxtrain.data.preview import plain_text
from jaxtrain.data.sample import Dropped, Sample, to_tree, to_trees
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.errors import UserError
from jaxtrain.methods.reward_model.config import RewardModelTask


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("images")
    (path / "wide.png").write_bytes(draw(20, 10))
    (path / "square.png").write_bytes(draw(40, 31))
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder)


@pytest.fixture(scope="module")
def read(folder, tokenizer):
    return make_reader(folder, tokenizer)


def ask(*parts, **columns):
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def part(text):
    return {"type": "text", "text": text}


WIDE = (
    f"<fake_token_around_image><row_1_col_1>{'<image>' * 4}"
    f"<fake_token_around_image><row_1_col_2>{'<image>' * 4}\n"
    f"\n<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
)
"""Text of a picture of 2 x 1 tiles, 2 x 2 tokens each; transformers' processor writes the same."""


def test_all_forms_of_an_image_give_the_same_tokens_and_image(folder, read):
    data = draw(20, 10)
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    rows = [
        ask({"type": "image", "path": "wide.png"}, part("What?")),
        ask({"type": "image", "image": str(folder / "wide.png")}, part("What?")),
        ask({"type": "image", "url": f"file://{folder}/wide.png", "text": None}, part("What?")),
        ask({"type": "image", "base64": base64.b64encode(data).decode()}, part("What?")),
        ask({"type": "image_url", "image_url": {"url": url}}, part("What?")),
        ask({"type": "image", "image": {"bytes": data, "path": "elsewhere.png"}}, part("What?")),
        ask({"type": "image"}, part("What?"), images=["wide.png"]),
        ask({"type": "image"}, part("What?"), image={"bytes": data, "path": None}),
        ask(part("What?"), image=data),
        ask(part("<image>What?"), images=["sub/../wide.png"]),
        {"prompt": "What?", "completion": "red", "images": ["wide.png"]},
        {"instruction": "What?", "output": "red", "image": "wide.png"},
        {
            "conversations": [
                {"from": "human", "value": "<image>What?"},
                {"from": "gpt", "value": "red"},
            ],
            "images": ["wide.png"],
        },
    ]
    for row in rows:
        [sample] = read(row)
        assert isinstance(sample, Sample), sample
        text = f"<|im_start|>User:{WIDE}What?<end_of_utterance>\nAssistant: red<end_of_utterance>\n"
        assert read.tokenizer.decode(sample.tokens) == text
        [image] = sample.images.images
        assert (image.size, image.num_features, image.num_patches) == ((20, 10), 12, 48)
        places = sample.tokens == read.tokenizer.image_format.token
        np.testing.assert_array_equal(sample.images.slot[places], np.arange(12))
        assert (sample.images.slot[~places] == -1).all()


def test_rows_without_images_are_written_although_the_template_reads_only_parts(read):
    [sample] = read({"messages": [{"role": "user", "content": "Hi"}, ANSWER]})
    expected = "<|im_start|>User: Hi<end_of_utterance>\nAssistant: red<end_of_utterance>\n"
    assert read.tokenizer.decode(sample.tokens) == expected and sample.images is None


def test_a_placeholder_that_a_text_spells_stays_text(read):
    [sample] = read(ask({"type": "image", "path": "wide.png"}, part("what is <image>?")))
    assert "what is <image>?" in read.tokenizer.decode(sample.tokens)
    assert np.count_nonzero(sample.tokens == read.tokenizer.image_format.token) == 12


def test_placeholders_never_train_and_masks_go_by_turns(folder, tokenizer):
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "wide.png"}, part("a")]},
            ANSWER,
            {"role": "user", "content": [part("b"), {"type": "image", "path": "square.png"}]},
            {"role": "assistant", "content": "blue"},
        ]
    }
    [sample] = make_reader(folder, tokenizer, train_on="all")(row)
    assert (sample.weights == 0).tolist() == [True, *(sample.images.slot[1:] >= 0)]
    [sample] = make_reader(folder, tokenizer)(row)
    trained = tokenizer.decode(sample.tokens[sample.weights > 0])
    assert trained == " red<end_of_utterance> blue<end_of_utterance>"
    assert [image.size for image in sample.images.images] == [(20, 10), (40, 31)]


BAD = [
    (ask({"type": "image"}, part("x")), "0 images in the column, 1 placeholders", "row 1"),
    (ask(part("<image><image>"), image="wide.png"), "1 images in the column, 2 placeholders", ""),
    (ask({"type": "image"}, images=["wide.png"] * 3), "3 images in the column, 1 placeholders", ""),
    (
        ask({"type": "image", "path": "wide.png"}, image="wide.png"),
        "images both in messages and in a column",
        "",
    ),
    (ask(part("x"), image="no.png"), "an image is absent", "row 1, image 1 ('no.png')"),
    (ask(part("x"), images=["wide.png", "no"]), "an image is absent", "row 1, image 2 ('no')"),
    (ask(part("x"), image="../../etc/passwd"), "an image lies outside of", "image 1 ('../.."),
    (ask(part("x"), image="/etc/passwd"), "an image lies outside of", ""),
    (ask(part("x"), image="file:///etc/passwd"), "an image lies outside of", ""),
    (ask(part("x"), image="https://a.b/c.png"), "an image is a URL, which are read only of", ""),
    (ask(part("x"), image="ftp://a.b/c.png"), "an image is a URL of scheme 'ftp'", ""),
    (ask(part("x"), image="http://[a/c.png"), "an image is no URL: Invalid IPv6 URL", ""),
    (ask(part("x"), image="train.jsonl"), "an image is none of PNG, JPEG", ""),
    (ask(part("x"), image="."), "an image is a folder, not a file", ""),
    (ask(part("x"), image=7), "an image is a number, not a path", ""),
    (ask({"type": "image", "base64": "%%"}), "an image is no base64", "message 1, image 1 (bytes)"),
    (ask(part("x"), image="data:image/png,xx"), "a data URL of an image is not in base64", ""),
    (ask({"type": "image", "path": "a", "url": "b"}), "an image needs one of", ""),
    (ask(part("x"), image=draw(9, 9)[:-30]), "an image cannot be decoded", "image 1 (bytes)"),
    (ask({"type": "video", "path": "x"}), "only text content is supported", "message 1"),
    (ask(part("x"), video="x.mp4"), "column video: only text is read", ""),
    ({"messages": [ANSWER], "image": "wide.png"}, "images without a message of the user", ""),
]


@pytest.mark.parametrize(("row", "reason", "place"), BAD)
def test_bad_images_are_dropped_by_row_index_and_reason(folder, read, row, reason, place):
    (folder / "train.jsonl").write_text("{}\n")
    [drop] = read(row)
    assert isinstance(drop, Dropped)
    assert drop.reason.startswith(f"malformed row: {reason}"), drop
    assert drop.origin.startswith("train.jsonl row 1") and place in drop.origin


@pytest.mark.parametrize(
    ("kind", "columns"),
    [("AnswerScores", {"completion": "red"}), ("StepScores", {"completions": ["red"]})],
)
def test_score_names_an_image_that_it_cannot_read(kind, columns, folder, tokenizer, monkeypatch):
    from jaxtrain.cli import scoring

    monkeypatch.setattr(scoring, "_scores_of", lambda model: None)
    config = SimpleNamespace(task=RewardModelTask())
    model = SimpleNamespace(tokenizer=tokenizer, max_len=200, config=config)
    read = getattr(scoring, kind)(model, DatasetConfig(path=str(folder / "train.jsonl"))).read
    drop = read({"prompt": "Which?", "image": "no.png", **columns}, "row 1")
    assert drop == Dropped("malformed row: an image is absent", "row 1, image 1 ('no.png')")


def test_without_the_format_images_are_refused_by_name(folder, tokenizer):
    plain = pickle.loads(pickle.dumps(tokenizer))
    assert plain.image_format == tokenizer.image_format, "workers get it with the tokenizer"
    plain.image_format = None
    read = make_reader(folder, plain)
    for row, reason in (
        (ask(part("x"), images=["wide.png"]), "column images: only text is read"),
        (ask({"type": "image", "path": "wide.png"}), "not a part of type image"),
    ):
        [drop] = read(row)
        assert reason in drop.reason.replace("'", "")


def test_a_cut_never_goes_through_an_image(folder, tokenizer):
    row = {
        "messages": [
            {"role": "user", "content": "a"},
            ANSWER,
            {"role": "user", "content": [{"type": "image", "path": "wide.png"}, part("b")]},
            ANSWER,
        ]
    }
    [whole] = make_reader(folder, tokenizer)(row)
    places = np.flatnonzero(whole.images.slot >= 0)
    opening, end = int(places[0]) - 2, int(places[-1]) + 2  # two control tokens, and one behind
    for length in range(opening - 2, end + 3):
        [sample] = make_reader(folder, tokenizer, length, "truncate")(row)
        assert len(sample.tokens) == (opening if opening < length < end else length)
        assert (sample.images is None) == (length < end)
        [drop] = make_reader(folder, tokenizer, length, "drop")(row)
        assert drop.reason == "too long"


def place(read, *names):
    return read(ask(*({"type": "image", "path": name} for name in names), part("What?")))[0]


def test_prefixes_of_different_images_are_not_shared(folder, read):
    """The tokens are the same: images of one size, and only their pixels differ."""
    (folder / "other.png").write_bytes(draw(20, 10, seed=1))
    first, other, same = (place(read, name) for name in ("wide.png", "other.png", "wide.png"))
    np.testing.assert_array_equal(first.tokens, other.tokens)

    def merge(*samples):
        flat = [FlatSequence(s.tokens, {"nll": s.weights}, images=s.images) for s in samples]
        return merge_prefixes(flat)

    [tree] = merge(first, same)
    assert [len(node.tokens) for node in tree.nodes] == [len(first.tokens)]
    [tree] = merge(first, other)
    start = int(np.flatnonzero(first.images.slot >= 0)[0])
    branch = len(first.tokens) - start
    assert [len(node.tokens) for node in tree.nodes] == [start, branch, branch]
    assert len(tree.images) == 2 and tree.num_patches == 2 * 48
    packed = lay_out(tree)
    np.testing.assert_array_equal(
        packed.images.slot[start : start + branch], first.images.slot[start:]
    )
    later = first.images.slot[start:]
    np.testing.assert_array_equal(
        packed.images.slot[start + branch :], np.where(later >= 0, later + 12, -1)
    )
    [tree] = share_prefixes([first, same], 400)
    assert tree.num_patches == 48
    assert len(share_prefixes([first, other], 400)) == 1


def test_packed_rows_hold_each_image_once(folder, tokenizer, read):
    samples = [
        place(read, "wide.png"),
        place(read, "square.png", "wide.png"),
        place(read, "wide.png"),
    ]
    text = Sample(np.arange(5, dtype=np.int32), np.ones(5, np.float32))
    packer = PatchPacker(tokenizer.image_format, 512)
    fields = Fields(images=packer)
    packed = [lay_out(to_tree(sample)) for sample in [*samples, text]]
    batch = build_batch([packed[:3], packed[3:]], 256, fields)
    check_batch(batch)
    slots, images = batch.streams[IMAGE_SLOT], batch.images
    assert images.pixels.shape == (2, 128, 3 * 4 * 4), "48 + 80 patches: a quarter of the budget"
    assert slots.max() == 12 + 20 - 1 and (slots[1] == -1).all()
    first, second, third = np.split(slots[0][slots[0] >= 0], [12, 44])
    np.testing.assert_array_equal(first, np.arange(12))
    np.testing.assert_array_equal(second, [*range(12, 32), *range(12)])
    np.testing.assert_array_equal(third, np.arange(12))
    # Padding sees itself alone.
    index = np.arange(128)
    assert (images.since[1] == index).all() and (images.until[1] == index + 1).all()
    assert (images.grid[1] == 1).all() and not images.pixels[1].any()
    # A tile is a segment of 16 patches, block by block.
    np.testing.assert_array_equal(images.since[0], index // 16 * 16)
    np.testing.assert_array_equal(images.until[0], images.since[0] + 16)
    np.testing.assert_array_equal(
        images.row_col[0, :8], [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3)]
    )
    assert (images.grid[0] == 4).all()

    alone = build_batch([packed[3:]], 256, fields)
    assert alone.images is None and (alone.streams[IMAGE_SLOT] == -1).all()
    shape = StepShape(1, 2, 256, fields=fields)
    step = shape.build([packed[:1], packed[3:]])
    assert step.images.pixels.shape == (2, 1, 128, 48), "all microsteps of a step have one shape"
    with pytest.raises(AssertionError, match="differ in fields"):
        stack_batches([alone, build_batch([packed[:1]], 256, fields)])


def test_rows_have_a_budget_of_patches_beside_tokens(read):
    assert fit_rows([5, 4, 3], 20, patches=([10, 10, 0], 16)) == [[0, 2], [1]]
    assert fit_rows([5, 4, 3], 20) == [[0, 1, 2]]
    [item] = to_trees([place(read, "wide.png")], 400, row_patches=47)
    assert item.reason == "too many patches of images for a row (data.image_patches)"
    [item] = to_trees([place(read, "wide.png")], 400, row_patches=48)
    assert item.num_patches == 48


def test_an_image_that_changes_after_its_row_was_read_is_named(folder, tokenizer, read):
    (folder / "later.png").write_bytes(draw(12, 12))
    sample = place(read, "later.png")
    packer = PatchPacker(tokenizer.image_format, 512)
    (folder / "later.png").write_bytes(draw(12, 13))
    with pytest.raises(UserError, match=r"row 1, image 1: an image has changed since its row"):
        packer.pack([sample.images], 128)
    (folder / "later.png").unlink()
    with pytest.raises(UserError, match="row 1, image 1: an image is absent"):
        packer.pack([sample.images], 128)


def test_sizes_are_bounded_before_anything_is_decoded(monkeypatch, read):
    for side in (8193, 60_000):
        huge = bytearray(draw(9, 9))
        huge[16:24] = side.to_bytes(4, "big") * 2  # the header of the PNG, and its checksum
        huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
        [drop] = read(ask(part("x"), image=bytes(huge)))
        assert drop.reason == "malformed row: an image has more than 67,108,864 pixels"
    monkeypatch.setattr(decode, "MAX_BYTES", 100)
    [drop] = read(ask(part("x"), image="square.png"))
    assert "an image has" in drop.reason and "at most 100 are read" in drop.reason


def test_workers_read_images(folder, tokenizer):
    dataset = DatasetConfig(path=str(folder / "train.jsonl"))
    tokenize = RowTokenizer(dataset, tokenizer, 400, "drop")
    copied = pickle.loads(pickle.dumps(tokenize))
    row = ask({"type": "image", "path": "wide.png"}, part("x"))
    [ours], [theirs] = tokenize(row, "a"), copied(row, "a")
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    assert ours.images.images == theirs.images.images


def test_a_pair_stores_the_image_of_its_prompt_once(folder, tokenizer):
    dataset = DatasetConfig(path=str(folder / "train.jsonl"))
    reader = RankedReader(dataset, tokenizer, 400, "drop", "pairs")
    row = {"prompt": "What?", "chosen": "red", "rejected": "blue", "images": ["wide.png"]}
    [ranked] = reader(row, "train.jsonl row 1")
    assert ranked.images.images[0].num_features == 12 and not ranked.answers[0].images
    for share in (True, False):
        packed = lay_out(PairTrees(share)(ranked), "branch")
        slots = packed.images.slot[packed.images.slot >= 0]
        np.testing.assert_array_equal(slots, [*range(12)] * (1 if share else 2))
        assert [image.key for image in packed.images.images] == [ranked.images.images[0].key]

    # Both answers are whole conversations, as TRL has them.
    talk = [{"role": "user", "content": [{"type": "image"}, part("What?")]}]
    whole = {
        "chosen": [*talk, {"role": "assistant", "content": [part("red")]}],
        "rejected": [*talk, {"role": "assistant", "content": [part("blue")]}],
        "images": ["wide.png"],
    }
    [same] = reader(whole, "train.jsonl row 1")
    np.testing.assert_array_equal(same.prompt, ranked.prompt)
    np.testing.assert_array_equal(same.images.slot, ranked.images.slot)


def test_answers_that_differ_in_their_images_alone_are_a_pair(folder, tokenizer):
    (folder / "other.png").write_bytes(draw(20, 10, seed=1))
    dataset = DatasetConfig(path=str(folder / "train.jsonl"))
    reader = RankedReader(dataset, tokenizer, 400, "drop", "pairs")

    def answer(name):
        return [{"role": "assistant", "content": [{"type": "image", "path": name}, part("so")]}]

    row = {"prompt": "Draw", "chosen": answer("wide.png"), "rejected": answer("other.png")}
    [ranked] = reader(row, "train.jsonl row 1")
    tree = PairTrees()(ranked)
    assert len(tree.images) == 2 and tree.num_patches == 96
    np.testing.assert_array_equal(ranked.answers[0].tokens, ranked.answers[1].tokens)
    [drop] = reader({**row, "rejected": answer("wide.png")}, "train.jsonl row 1")
    assert drop.reason == f"malformed row: {SAME}"
    hole = [{"role": "assistant", "content": [{"type": "image"}, part("so")]}]
    [drop] = reader({**row, "rejected": hole}, "train.jsonl row 1")
    assert drop.reason == "malformed row: a part of type image holds no image"


def test_prompts_are_grouped_by_their_images(folder, tokenizer):
    (folder / "other.png").write_bytes(draw(20, 10, seed=1))
    dataset = DatasetConfig(path=str(folder / "train.jsonl"), group_prompts=True)
    reader = RankedReader(dataset, tokenizer, 400, "drop", "pairs")
    row = {"prompt": "What?", "chosen": "red", "rejected": "blue", "images": ["wide.png"]}
    keys = [reader.key({**row, "images": [name]}) for name in ("wide.png", "other.png")]
    assert keys[0] != keys[1] and reader.key(row) == keys[0]
    [ranked] = reader({"group": [row, {**row, "rejected": "green"}]}, "rows 1 and 2")
    assert len(ranked.answers) == 3 and len(PairTrees()(ranked).images) == 1


def test_images_of_a_parquet_file_are_read_as_they_are_stored(tmp_path, tokenizer):
    """Read the stored bytes: by their features, datasets would decode them without any bound."""
    datasets = pytest.importorskip("datasets")
    image = {"bytes": draw(20, 10), "path": "wide.png"}
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "completion": datasets.Value("string"),
            "images": datasets.List(datasets.Image()),
        }
    )
    row = {"prompt": ["What?"], "completion": ["red"], "images": [[image, image]]}
    datasets.Dataset.from_dict(row, features).to_parquet(tmp_path / "train.parquet")
    dataset = DatasetConfig(path=str(tmp_path / "train.parquet"))
    rows = open_rows(dataset)
    assert rows[0]["images"] == [image, image]
    [sample] = RowTokenizer(dataset, tokenizer, 400, "drop")(rows[0], rows.origin(0))
    assert [shown.size for shown in sample.images.images] == [(20, 10)]


def test_images_are_counted_by_what_is_embedded(read):
    pair = share_prefixes([place(read, "wide.png"), place(read, "wide.png", "square.png")], 400)
    trees = [to_tree(item) if isinstance(item, Sample) else item for item in pair]
    counts = count_images([[*trees, to_tree(place(read, "wide.png"))], trees])
    assert counts == {"images": 4, "images_shared": 3, "image_tokens": 64, "patches": 256}


def test_a_preview_shows_a_number_in_place_of_placeholders(read):
    text = plain_text(place(read, "wide.png"), read.tokenizer)
    assert "<row_1_col_1><image> x 4 <fake_token_around_image>" in text
    assert text.endswith("Assistant:⟦ red<end_of_utterance>⟧\n"), text
