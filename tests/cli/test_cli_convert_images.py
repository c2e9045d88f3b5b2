"""`jaxtrain convert` of configs with images: the parts that train, and families that read none."""

import json

import pytest
from test_cli_convert_systems import BASE, convert

from jaxtrain.cli.convert import check, find_missing_families
from jaxtrain.convert import trl

SMOL = "HuggingFaceTB/SmolVLM-Instruct"
VLM = "python sft_vlm.py --model_name_or_path {} --dataset_name d --num_train_epochs 1"
PICTURES = {"pics": {"file_name": "pics.json", "columns": {"messages": "m", "images": "photo"}}}
FACTORY = {"stage": "sft", "dataset": "pics", "dataset_info": PICTURES, "media_dir": "photos"}


@pytest.mark.parametrize(
    ("keys", "vision", "target"),
    [
        ({}, "all", None),
        ({"freeze_mm_modules": True}, None, None),
        (
            {"adapter": "lora", "lora_target_linear": True},
            None,
            ["all-linear", "tower", "projector"],
        ),
        ({"adapter": "lora", "lora_target_modules": ["q_proj"]}, None, ["q_proj"]),
    ],
)
def test_axolotl_trains_the_parts_for_images_too(keys, vision, target):
    keys = {**BASE, "base_model": SMOL, "processor_type": "AutoProcessor", **keys}
    conversion = convert("axolotl", **keys)
    assert (conversion.get("model.vision.train"), conversion.get("adapter.target")) == (
        vision,
        target,
    )
    noted = any('"tower" and "projector"' in text for _, text in conversion.notes)
    assert noted == (target == ["q_proj"])
    assert check(conversion) is None


@pytest.mark.parametrize(
    ("keys", "vision", "target"),
    [
        ({"finetuning_type": "full"}, None, None),
        ({"finetuning_type": "full", "freeze_multi_modal_projector": False}, "projector", None),
        ({"finetuning_type": "full", "freeze_vision_tower": False}, "all", None),
        (
            {"lora_target": "all", "freeze_vision_tower": False},
            None,
            ["all-linear", "tower"],
        ),
    ],
)
def test_llama_factory_freezes_the_parts_for_images(keys, vision, target):
    conversion = convert("llama-factory", model_name_or_path=SMOL, **FACTORY, **keys)
    assert (conversion.get("model.vision.train"), conversion.get("adapter.target")) == (
        vision,
        target,
    )
    (dataset,) = conversion.get("data.datasets")
    assert dataset["fields"] == {"messages": "m", "images": "photo"}
    assert dataset["image_folder"] == "photos" and check(conversion) is None
    assert any("589,824 pixels" in text for _, text in conversion.notes)


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2-VL-2B-Instruct"])
def test_configs_of_older_qwen_models_are_ready(name):
    conversions = [
        convert("axolotl", **{**BASE, "base_model": name, "processor_type": "AutoProcessor"}),
        convert("llama-factory", model_name_or_path=name, **FACTORY),
        trl.convert(trl.parse_command(VLM.format(name))),
    ]
    assert [check(conversion) for conversion in conversions] == [None] * 3


def test_families_that_read_no_images_are_named(tmp_path):
    source = trl.parse_command(VLM.format(SMOL))
    conversion = trl.convert(source)
    assert conversion.get("model.vision.train") == "all" and check(conversion) is None
    refusal = check(trl.convert({**source, "model_name_or_path": "some/text-1b"}))
    assert "command: the model reads no images" in refusal and "smolvlm" in refusal
    # A name longer than a file's is looked up in no folder; without any, no model is judged.
    assert "reads no images" in check(trl.convert({**source, "model_name_or_path": "x" * 300}))
    assert find_missing_families(None) is None
    # The folder's own model_type counts, whatever its name.
    folder = tmp_path / "smolvlm"
    folder.mkdir()
    for model_type, reads in (("llama", False), ("idefics3", True)):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        conversion = trl.convert({**source, "model_name_or_path": str(folder)})
        assert (check(conversion) is None) == reads
