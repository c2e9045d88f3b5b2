"""PEFT folders whose tensors hold the adapter's name, as in a module's state_dict."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_adapters_peft import make_params, write_case

from jaxtrain.adapters.peft import load_trained, read_adapter
from jaxtrain.adapters.peft_folder import open_peft
from jaxtrain.errors import UserError


def named_tensors(tensors, name):
    """Return the tensors of save_pretrained as PEFT's modules name them."""

    def rename(tensor):
        if tensor.endswith("lora_magnitude_vector"):
            return f"{tensor}.{name}.weight"
        module, _, end = tensor.rpartition(".")
        part = "" if module.endswith(("lora_A", "lora_B")) else ".modules_to_save"
        return f"{module}{part}.{name}.{end}"

    return {rename(tensor): value for tensor, value in tensors.items()}


@pytest.mark.parametrize("case", ["dora", "embeddings"])
def test_tensors_of_a_state_dict_hold_the_adapters_name(case, tmp_path):
    config, adapter, values, _ = write_case(tmp_path, case)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    saved = load_file(file)
    save_file(named_tensors(saved, "my-task"), file)
    actual = read_adapter(tmp_path / "adapter", config, "float32")
    assert actual.slots == adapter.slots and actual.full == adapter.full
    loaded = load_trained(make_params(config, actual)[0], config, actual)
    for path, value in values.items():
        np.testing.assert_array_equal(loaded[path], value)
    for others in (named_tensors(saved, "other"), saved):
        save_file({**named_tensors(saved, "my-task"), **others}, file)
        with pytest.raises(UserError, match="several adapters .my-task.*selected_adapters"):
            read_adapter(tmp_path / "adapter", config, "float32")
    with pytest.raises(UserError, match="the adapters adapter: name one of them"):
        open_peft(tmp_path)
