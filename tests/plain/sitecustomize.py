"""On PYTHONPATH of the processes that tests start: they see no PyTorch, as with most who install
jaxtrain. transformers would import it where it is there, a fifth of what a short run takes."""

import importlib.util

_find_spec = importlib.util.find_spec


def find_spec(name: str, package: str | None = None):
    return None if name == "torch" else _find_spec(name, package)


importlib.util.find_spec = find_spec
