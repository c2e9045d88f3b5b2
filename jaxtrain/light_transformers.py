"""Import transformers without PyTorch in processes that run a command.

A command needs tokenizers, configs and chat templates, none of which needs PyTorch. Where PyTorch
is installed, transformers imports it all the same, for several seconds. And it reads all modeling
files for the names that `transformers` has, most of its own time, which is left until somebody asks
for such a name. Code from outside jaxtrain may need all of transformers: before the first of it is
imported, transformers is forgotten, and its next import is the usual one.
"""

import copyreg
import importlib
import importlib.machinery
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any

from jaxtrain import plugins


class LightLoader(Loader):
    """Loader that runs a package while PyTorch seems not to be installed."""

    def __init__(self, loader: Loader) -> None:
        self.loader, self.used = loader, False

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # transformers looks for PyTorch once, and remembers the answer: every module of it that is
        # imported later does without.
        self.used = True
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType] -- what import knows
        try:
            self.loader.exec_module(module)
            NameLoader.defer(sys.modules["transformers"])
        finally:
            del sys.modules["torch"]
            assert module.__spec__ is not None, "a module that is being imported has one"
            module.__spec__.loader = module.__loader__ = self.loader  # for importlib.resources


class NameLoader(Loader):
    """Loader of transformers.utils.import_utils, whose function that reads all modeling files then
    does nothing at first."""

    read: partial[dict] | None = None
    """Reads them; None before transformers asks for it, and with one that never does."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        define = getattr(module, "define_import_structure", None)
        if define is None:  # of a version that gets its names otherwise
            return

        def define_later(path: Any, prefix: str | None = None) -> dict:
            if prefix != "models":
                return define(path, prefix)
            NameLoader.read = partial(define, path, prefix)
            return {frozenset(): {}}

        module.define_import_structure = define_later  # pyright: ignore

    @staticmethod
    def defer(package: ModuleType) -> None:
        """Defer the names of `package`, transformers, until it is asked for an unknown one."""
        read, usual = NameLoader.read, type(package)
        if read is None:
            return

        class LateNames(usual):
            def __getattr__(self, name: str) -> Any:
                tables = self._class_to_module, self._objects, self._modules
                if not name.startswith("__") and not any(name in table for table in tables):
                    if (tokenizer := find_tokenizer_class(name)) is not None:
                        return tokenizer
                    self.__class__ = usual  # pyright: ignore
                    structure = {**read()}
                    structure[frozenset()] = {**structure[frozenset()], **self._import_structure}
                    parts = self.__name__, self.__file__, structure, self.__spec__, self._objects
                    full = usual(*parts)
                    vars(self).update(vars(full))
                return usual.__getattr__(self, name)

        package.__class__ = LateNames  # pyright: ignore


def find_tokenizer_class(name: str) -> Any:
    """Return the class that transformers has by this name, if it is a tokenizer in the folder of
    its own family, such as Qwen2Tokenizer in models.qwen2; else None. Folders of other families
    name it, too, and reading all names for that takes 0.6 s."""
    family, suffix, other = name.partition("Tokenizer")
    if other or not suffix or not family.isalnum():
        return None
    try:
        module = importlib.import_module(f"transformers.models.{family.lower()}")
    except ImportError:
        return None
    return getattr(module, name) if name in getattr(module, "_class_to_module", ()) else None


class LightFinder(MetaPathFinder):
    """Finder of transformers alone, unless PyTorch is already imported.

    The file of transformers.models is left out: it reads all modeling files, for names that nothing
    here takes from it, after transformers itself read them.
    """

    loader: LightLoader | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == "transformers.models" and self.loader is not None and self.loader.used:
            models = importlib.machinery.ModuleSpec(name, None, is_package=True)
            models.submodule_search_locations = [f"{folder}/models" for folder in path or ()]
            return models
        if name == "transformers.utils.import_utils" and self.loader is not None:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = NameLoader(spec.loader)
            return spec
        if name != "transformers" or "torch" in sys.modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = self.loader = LightLoader(spec.loader)
        return spec


def install() -> None:
    """Make the first import of transformers a light one, until code from outside is imported."""
    finder = LightFinder()
    sys.meta_path.insert(0, finder)

    def restore() -> None:
        plugins.before_import.remove(restore)
        sys.meta_path.remove(finder)
        if finder.loader is not None and finder.loader.used:
            forget_transformers()

    plugins.before_import.append(restore)


def forget_transformers() -> None:
    """Remove transformers from the imported modules. Its tokenizers stay usable, and are pickled by
    the name of their class, which is then another object of the same source."""
    base = sys.modules.get("transformers.tokenization_utils_base")  # absent without a tokenizer
    pending = [] if base is None else [base.PreTrainedTokenizerBase]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        copyreg.pickle(kind, _reduce_by_name)
    for name in [name for name in sys.modules if f"{name}.".startswith("transformers.")]:
        del sys.modules[name]


def _reduce_by_name(value: Any) -> tuple[Any, ...]:
    return _rebuild, (type(value).__module__, type(value).__qualname__, vars(value))


def _rebuild(module: str, name: str, state: dict[str, Any]) -> Any:
    kind = getattr(importlib.import_module(module), name)
    value = kind.__new__(kind)
    vars(value).update(state)
    return value
