"""Pixels of images, to the bit those of the Pillow-based image processors of transformers."""

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageOps
from smolvlm_text import (
    ANSWER,
    CONFIG,
    QWEN_TEMPLATE,
    SETTINGS,
    draw,
    encode,
    make_reader,
    open_tokenizer,
)

from jaxtrain.config.data import DataConfig
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.images.decode import decode, measure
from jaxtrain.data.images.format import read_format
from jaxtrain.data.images.setup import open_packer
from jaxtrain.errors import UserError

transformers = pytest.importorskip("transformers.models.smolvlm.image_processing_pil_smolvlm")


def odd_files():
    """Bytes of 200 files: sizes, modes and kinds that go wrong elsewhere."""
    rng = np.random.default_rng(3)

    def noise(*shape, top=256, dtype=np.uint8):
        return rng.integers(0, top, shape).astype(dtype)

    sizes = [(1, 1), (1, 90), (150, 1), (2, 3), (33, 16), (16, 16), (17, 200), (320, 20)]
    for number in range(110):
        width, height = sizes[number] if number < len(sizes) else rng.integers(1, 180, 2).tolist()
        yield encode(Image.fromarray(noise(height, width, 3)))
    for number in range(80):
        width, height = rng.integers(1, 70, 2).tolist()
        picture = Image.fromarray(noise(height, width, 3))
        match number % 10:
            case 0:
                yield encode(Image.fromarray(noise(height, width, 4), "RGBA"))
            case 1:
                yield encode(Image.fromarray(noise(height, width, 2), "LA"))
            case 2:
                yield encode(picture.quantize(17), transparency=3)
            case 3:
                yield encode(picture.convert("CMYK"), "JPEG", quality=90)
            case 4:
                yield encode(Image.fromarray(noise(height, width, top=65536, dtype=np.uint16)))
            case 5:
                frames = [Image.fromarray(noise(height, width, 3)) for _ in range(3)]
                yield encode(picture, "GIF", save_all=True, append_images=frames)
            case 6:
                yield encode(picture.convert("1"))
            case 7:
                yield encode(picture, "WEBP", lossless=True)
            case 8:
                yield encode(picture.convert("L"), "JPEG")
            case _:
                yield encode(picture.quantize(9), "BMP")
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield encode(Image.fromarray(noise(23, 41, 3)), "JPEG", exif=exif)
    exif = Image.Exif()
    exif[0x0112] = 6
    yield encode(Image.fromarray(noise(20, 50, 4), "RGBA"), "PNG", exif=exif)
    yield encode(Image.fromarray(noise(20, 50, 3)), "TIFF", exif=exif)


def unblock(patches, form):
    """Return float32 [tiles, 3, side, side]: patches put in their places by row and column."""
    p, side = form.patch, form.patch * int(patches.grid[0, 0])
    tiles = np.zeros((len(set(patches.since.tolist())), 3, side, side), np.float32)
    starts = sorted(set(patches.since.tolist()))
    for values, since, (row, col) in zip(
        patches.pixels, patches.since, patches.row_col, strict=True
    ):
        block = values.reshape(3, p, p)
        looked_up = np.stack([form.values[block[c], c] for c in range(3)])
        tiles[starts.index(since), :, row * p : row * p + p, col * p : col * p + p] = looked_up
    return tiles


@pytest.mark.parametrize("splits", [pytest.param(True, marks=pytest.mark.slow), False])
def test_smolvlm_pixels_equal_those_of_transformers(splits, tmp_path):
    settings = {
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 16},
        "image_mean": [0.5, 0.45, 0.4],
        "image_std": [0.5, 0.3, 0.2],
        "do_image_splitting": splits,
    }
    form = open_tokenizer(tmp_path, settings).image_format
    processor = transformers.SmolVLMImageProcessorPil(**settings)
    files = list(odd_files())
    assert len(files) == 200
    for number, data in enumerate(files[:: 1 if splits else 5]):
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = processor(picture, return_row_col_info=True)
        size = measure(data)
        assert size == picture.size
        rows, cols = expected["rows"][0][0], expected["cols"][0][0]
        assert form.count_tiles(size) == (rows, cols), number
        patches = form.cut(decode(data))
        assert form.count(size) == (len(patches.pixels), len(patches.pixels) // 4)
        tiles = np.asarray(expected["pixel_values"][0], np.float32)
        np.testing.assert_array_equal(unblock(patches, form), tiles, err_msg=f"file {number}")


def test_the_text_of_an_image_is_that_of_transformers(tmp_path):
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    form = open_tokenizer(tmp_path).image_format
    for size in [(20, 10), (40, 31), (8, 60), (1, 1)]:
        names = ("<fake_token_around_image>", "<image>", "<global-img>")
        expected = get_image_prompt_string(*form.count_tiles(size), 4, *names)
        assert form.expand(size) == expected
        assert form.count(size)[1] == expected.count("<image>")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF"])
def test_a_truncated_file_is_refused(kind):
    whole = encode(Image.open(io.BytesIO(draw(60, 50))), kind)
    assert measure(whole) == (60, 50)
    for read in (measure, decode):
        with pytest.raises(MalformedRow, match="an image cannot be decoded|an image is none of"):
            read(whole[: len(whole) * 3 // 4])


def test_broken_exif_data_are_refused():
    whole = encode(Image.open(io.BytesIO(draw(60, 50))), "PNG", exif=b"Exif\0\0no such header")
    for read in (measure, decode):
        with pytest.raises(MalformedRow, match="an image cannot be decoded: not a TIFF file"):
            read(whole)


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a"]
)
def test_what_is_no_image_is_refused(data):
    with pytest.raises(MalformedRow, match="an image"):
        measure(data)


BAD = [
    ({"do_resize": False}, "do_resize to false; only true is read"),
    ({"do_normalize": False}, "do_normalize to false; only true"),
    ({"max_image_size": {"longest_edge": 20}}, "tiles of 20 pixels .* tower for 16 pixels"),
    ({"image_mean": [0.5]}, "image_mean and image_std need a number for each channel"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_settings_that_are_not_followed_are_named(change, message, tmp_path):
    settings = {"max_image_size": {"longest_edge": 16}, **change}
    with pytest.raises(UserError, match=message):
        open_tokenizer(tmp_path, settings)


def test_settings_that_are_not_followed_refuse_no_text(tmp_path, capsys):
    tokenizer = open_tokenizer(tmp_path)
    settings = json.dumps(SETTINGS | {"do_resize": False})
    (tmp_path / "preprocessor_config.json").write_text(settings)
    assert (
        open_packer(tmp_path, CONFIG, tokenizer, DataConfig(datasets=[], sequence_len=64), 64)
        is None
    )
    assert tokenizer.image_format is None
    named = capsys.readouterr().err
    assert "do_resize to false" in named and "rows with images are left out" in named


def test_a_placeholder_that_is_no_control_token_is_named(tmp_path):
    tokenizer = open_tokenizer(tmp_path)
    with pytest.raises(UserError, match="has no control token '<picture>'"):
        tokenizer.image_token = "<picture>"
        read_format(tmp_path, CONFIG, tokenizer)


def test_a_folder_without_settings_is_named(tmp_path, capsys):
    assert read_format(tmp_path, CONFIG, None) is None
    error = capsys.readouterr().err
    assert "has no preprocessor_config.json or processor_config" in error
    assert error.endswith("rows with images are left out\n")
    (tmp_path / "preprocessor_config.json").write_text("[]")
    with pytest.raises(UserError, match="is no JSON object"):
        read_format(tmp_path, CONFIG, None)
    assert read_format(tmp_path, {"model_type": "llama"}, None) is None


QWEN = {
    "patch_size": 4,
    "merge_size": 2,
    "size": {"shortest_edge": 600, "longest_edge": 9000},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.3, 0.2],
}
QWEN_CONFIG = {
    "model_type": "qwen3_vl",
    "vision_config": {"patch_size": 4, "spatial_merge_size": 2},
}


def open_qwen(folder, settings, config=QWEN_CONFIG):
    return open_qwen_tokenizer(folder, settings, config).image_format


def open_qwen_tokenizer(folder, settings, config=QWEN_CONFIG):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    tokenizer.chat_template = QWEN_TEMPLATE
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    tokenizer.image_format = read_format(folder, config, tokenizer)
    return tokenizer


def test_qwen_pixels_equal_those_of_transformers(tmp_path):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    form, processor = open_qwen(tmp_path, QWEN), Qwen2VLImageProcessorPil(**QWEN)
    for number, data in enumerate(odd_files()):
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = processor(picture)
        [(_, rows, cols)] = expected["image_grid_thw"]
        size, patches = measure(data), form.cut(decode(data))
        assert form.count(size) == (rows * cols, rows * cols // 4)
        assert form.expand(size) == "<|image_pad|>" * (rows * cols // 4)
        # A still stands twice in their columns: channel, time, row, column.
        theirs = np.asarray(expected["pixel_values"]).reshape(-1, 3, 2, 16)
        ours = np.stack([form.values[patches.pixels[:, c * 16 : c * 16 + 16], c] for c in range(3)])
        for time in range(2):
            np.testing.assert_array_equal(ours, theirs[:, :, time].transpose(1, 0, 2), str(number))
        assert (patches.grid == (rows, cols)).all() and (patches.until == rows * cols).all()


GEMMA = {"size": {"height": 33, "width": 33}, "image_std": [0.5, 0.3, 0.2], "do_convert_rgb": None}
GEMMA_CONFIG = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "vision_config": {"patch_size": 5, "image_size": 33},
}


def open_gemma(folder, settings):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), ["<image_soft_token>", "<start_of_image>", "<end_of_image>"])
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_format(folder, GEMMA_CONFIG, tokenizer)


def test_gemma_pixels_equal_those_of_transformers(tmp_path):
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    plain = {key: value for key, value in GEMMA.items() if value is not None}
    form, processor = open_gemma(tmp_path, GEMMA), Gemma3ImageProcessorPil(**plain)
    text = f"\n\n<start_of_image>{'<image_soft_token>' * 4}<end_of_image>\n\n"
    for number, data in enumerate(odd_files()):
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = np.asarray(processor(picture)["pixel_values"][0])
        patches = form.cut(decode(data))
        assert form.count(measure(data)) == (36, 4) and form.expand(measure(data)) == text
        # A convolution without padding leaves out what is no whole patch.
        ours = unblock(patches, form)[0]
        np.testing.assert_array_equal(ours, expected[:, :30, :30], err_msg=f"file {number}")


def test_gemma_refuses_what_it_does_not_follow(tmp_path):
    with pytest.raises(UserError, match="sets do_pan_and_scan to true; only false is read"):
        open_gemma(tmp_path, {**GEMMA, "do_pan_and_scan": True})
    with pytest.raises(UserError, match="makes pictures of 40 x 40 pixels .* made for 33 x 33"):
        open_gemma(tmp_path, {**GEMMA, "size": {"height": 40, "width": 40}})


GEMMA4 = {"patch_size": 5, "pooling_kernel_size": 2, "max_soft_tokens": 70}
GEMMA4_CONFIG = {
    "model_type": "gemma4",
    "vision_config": {
        **{"patch_size": 5, "pooling_kernel_size": 2, "position_embedding_size": 150},
    },
}


def open_gemma4(folder, settings):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), ["<|image|>", "<|image>", "<image|>"])
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return read_format(folder, GEMMA4_CONFIG, tokenizer)


@pytest.mark.parametrize("normalized", [False, True])
def test_gemma4_pixels_equal_those_of_transformers(normalized, tmp_path):
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    settings = dict(GEMMA4)
    if normalized:
        settings |= {"do_normalize": True, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.4] * 3}
    form, processor = open_gemma4(tmp_path, settings), Gemma4ImageProcessorPil(**settings)
    form.write(tmp_path)  # what it writes is read alike
    written = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert open_gemma4(tmp_path, written) == form
    seen = set()
    for number, data in enumerate(list(odd_files())[:: 5 if normalized else 1]):
        picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        expected = processor(picture)
        places = np.asarray(expected["image_position_ids"][0])
        n = int((places[:, 0] >= 0).sum())
        patches, size = form.cut(decode(data)), measure(data)
        assert form.count(size) == (n, expected["num_soft_tokens_per_image"][0]), number
        assert form.expand(size) == f"<|image>{'<|image|>' * (n // 4)}<image|>"
        # Theirs row by row, (x, y), numbers by row, column and channel.
        order = np.lexsort(patches.row_col.T[::-1])
        np.testing.assert_array_equal(patches.row_col[order, ::-1], places[:n])
        ours = np.stack([form.values[patches.pixels[:, c * 25 : c * 25 + 25], c] for c in range(3)])
        theirs = np.asarray(expected["pixel_values"][0])[:n].reshape(n, 25, 3)
        np.testing.assert_array_equal(ours.transpose(1, 2, 0)[order], theirs, str(number))
        assert (patches.grid == places[:n].max(0)[::-1] + 1).all() and (patches.until == n).all()
        seen.add(n)
    assert len(seen) > 5


def test_gemma4_refuses_what_it_does_not_follow(tmp_path):
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    form = open_gemma4(tmp_path, GEMMA4)
    for height in (1, 2, 3, 7, 30, 71, 1000):
        for width in range(1, 400, 7):
            expected = get_aspect_ratio_preserving_size(height, width, 5, 280, 2)
            assert form.fit((width, height)) == expected[::-1], (width, height)
    for change, message in (
        ({"max_soft_tokens": 100}, "max_soft_tokens to 100; it must be one of 70, 140"),
        ({"max_soft_tokens": 140}, "the tower has 150 positions"),
        ({"patch_size": 6}, "sets patch_size to 6; only 5 is read"),
        ({"do_resize": False}, "sets do_resize to false; only true is read"),
    ):
        with pytest.raises(UserError, match=message):
            open_gemma4(tmp_path, {**GEMMA4, **change})


def test_qwen_refuses_what_it_does_not_follow(tmp_path):
    form = open_qwen(tmp_path, QWEN)
    with pytest.raises(MalformedRow, match="an image is more than 200 times as long as wide"):
        form.count((401, 2))
    assert form.count((400, 2))[1] > 0
    without = {key: value for key, value in QWEN.items() if key != "size"}
    with pytest.raises(UserError, match="its image processor does not say size"):
        open_qwen(tmp_path, without)
    old = {**without, "min_pixels": 600, "max_pixels": 9000}
    assert open_qwen(tmp_path, old) == form
    for model_type in ("qwen2_vl", "qwen2_5_vl"):  # which have the same image processor
        assert open_qwen(tmp_path, QWEN, {**QWEN_CONFIG, "model_type": model_type}) == form
    with pytest.raises(UserError, match="sets merge_size to 3; only 2 is read"):
        open_qwen(tmp_path, {**QWEN, "merge_size": 3})
    with pytest.raises(UserError, match=r"image_token_id is 7, but the tokenizer's '<\|image_pad"):
        open_qwen(tmp_path, QWEN, {**QWEN_CONFIG, "image_token_id": 7})


@pytest.mark.parametrize(
    "setting", [{"min_pixels": "many"}, {"size": 5}, {"image_mean": 0.5}, {"resample": "cubic"}]
)
def test_settings_of_another_type_are_named(tmp_path, setting):
    with pytest.raises(UserError, match="a setting of its image processor has a value of the wro"):
        open_qwen(tmp_path, QWEN | setting)


@pytest.mark.parametrize("setting", [{"max_image_size": 5}, {"size": [1]}, {"image_std": "x"}])
def test_tiled_settings_of_another_type_are_named(tmp_path, setting):
    with pytest.raises(UserError, match="a setting of its image processor has a value of the wro"):
        open_tokenizer(tmp_path, SETTINGS | setting)


def test_qwen_rows_are_cut_before_what_opens_an_image(tmp_path):
    tokenizer = open_qwen_tokenizer(tmp_path, QWEN)
    show = {"role": "user", "content": [{"type": "image", "image": draw(20, 10)}, "so?"]}
    row = {"messages": [{"role": "user", "content": "a"}, ANSWER, show, ANSWER]}
    [whole] = make_reader(tmp_path, tokenizer)(row)
    places = np.flatnonzero(whole.images.slot >= 0)
    first, last = int(places[0]), int(places[-1])
    text = tokenizer.decode(whole.tokens[first - 1 : last + 2])
    assert text == f"<|vision_start|>{'<|image_pad|>' * len(places)}<|vision_end|>"
    for length in range(first - 2, last + 4):
        [sample] = make_reader(tmp_path, tokenizer, length, "truncate")(row)
        within = first - 1 < length < last + 2
        assert len(sample.tokens) == (first - 1 if within else length), length
