"""Commands import transformers without PyTorch; plugins find both."""

import subprocess
import sys

import pytest

PROGRAM = """
import pickle, sys
from jaxtrain import light_transformers, plugins

light_transformers.install()
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CONFIG_MAPPING["llama"], CONFIG_MAPPING["gemma3_text"]
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")),
    unk_token="?",
    eos_token="b",
    chat_template="{{ messages[0].content }}",
)
print("torch" in sys.modules)
module = plugins.load_module(sys.argv[1], key="rewards.0.function")
print("torch" in sys.modules, module.Model.__name__, module.available)
for copy in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
    text = copy.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    print(copy.encode("a"), copy.eos_token, len(copy), text)
print(isinstance(copy, module.transformers.PreTrainedTokenizerFast))
"""
PLUGIN = """
import transformers, torch

Model = transformers.AutoModelForCausalLM
available = transformers.utils.is_torch_available()
"""


def test_transformers_is_light_until_a_plugin_is_imported(tmp_path):
    pytest.importorskip("torch", reason="it is PyTorch that is not imported")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)
    command = [sys.executable, "-c", PROGRAM, str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "False",
        "True AutoModelForCausalLM True",
        "[0] b 3 hello",
        "[0] b 3 hello",
        "True",
    ]
