"""Commands import transformers without PyTorch; plugins find both."""

import subprocess
import sys

import pytest

from jaxtrain import light_transformers

PROGRAM = """
import pickle, sys
from jaxtrain import light_transformers, plugins

light_transformers.install()
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CONFIG_MAPPING["llama"], CONFIG_MAPPING["gemma3_text"]
package = sys.modules["transformers"]
# Names of models are read once somebody asks for one, but for a tokenizer.
print(package.Qwen2Tokenizer.__module__, "LlamaConfig" in package.__all__)
print("LlamaConfig" in package.__all__, hasattr(package, "NoSuchName"))
from transformers import AutoTokenizer, LlamaConfig
print("LlamaConfig" in package.__all__, AutoTokenizer.__module__.rpartition(".")[2])
print(getattr(sys.modules["transformers.models"], "__file__", None))  # reads all modeling files
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
BEFORE_A_TOKENIZER = """
import sys
from jaxtrain import light_transformers, plugins

light_transformers.install()
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

print("torch" in sys.modules, "transformers.tokenization_utils_base" in sys.modules)
print(plugins.load_module(sys.argv[1], key="optim.name").available)
"""
PLUGIN = """
import transformers, torch

Model = transformers.AutoModelForCausalLM
available = transformers.utils.is_torch_available()
"""


@pytest.fixture
def run(tmp_path):
    """Return what runs a program in a process of its own, with the path of a plugin; its lines."""
    pytest.importorskip("torch", reason="it is PyTorch that is not imported")
    plugin = tmp_path / "plugin.py"
    plugin.write_text(PLUGIN)

    def run_program(program):
        command = [sys.executable, "-c", program, str(plugin)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_program


@pytest.mark.slow
def test_transformers_is_light_until_a_plugin_is_imported(run):
    assert run(PROGRAM) == [
        "transformers.models.qwen2.tokenization_qwen2 False",
        "False False",
        "True tokenization_auto",
        "None",
        "False",
        "True AutoModelForCausalLM True",
        "[0] b 3 hello",
        "[0] b 3 hello",
        "True",
    ]


@pytest.mark.slow
def test_a_plugin_may_come_before_any_tokenizer(run):
    assert run(BEFORE_A_TOKENIZER) == ["False False", "True"]


@pytest.mark.slow
def test_tokenizers_of_folders_are_those_of_transformers():
    """But for classes whose libraries are missing, each of which is another object every time."""
    import transformers

    names = [name for name in transformers.__all__ if name.endswith("Tokenizer")]
    classes = {name: light_transformers.find_tokenizer_class(name) for name in names}
    assert {"Qwen2Tokenizer", "LlamaTokenizer"} <= {n for n, kind in classes.items() if kind}
    for name, kind in classes.items():
        if kind is not None and not kind.__qualname__.endswith("Placeholder"):
            assert kind is getattr(transformers, name), name
