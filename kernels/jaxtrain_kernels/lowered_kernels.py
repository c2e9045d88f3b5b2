"""Mosaic kernels lowered once: for a process, and on disk beside jax's compiled programs.

jax lowers every call of a Mosaic GPU kernel again, in Python: a quarter of a second for each of a
step's dozen. What it makes is a function of the kernel's jaxpr, the shapes around it, the GPU's
architecture and jax's version, so it is kept under a hash of these. On disk, it lies in `mosaic/`
of jax's compilation cache, for processes after this one.

A hash covers every parameter of every operation. An object that `Describer` does not know, such as
a function of another package, stops it, and that kernel is lowered as always. Debug locations and a
counter of kernels are left out: jax's own key of a program, which covers its kernels' text, depends
neither on where a package is installed nor on what the process lowered before, and XLA compiles
equal kernels once.
"""

import contextlib
import dataclasses
import enum
import functools
import hashlib
import io
import json
import os
import tempfile
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.extend import core

NAME = "mosaic_gpu.dump_basename"
"""Attribute of a module that ends in the number of kernels that the process lowered before."""
MAX_DEPTH = 200
PACKAGES = frozenset({"jax", "jaxlib", __package__})
"""Packages whose functions `describe_process` covers, with all that they call."""
PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class UnknownObjectError(Exception):
    """A part of a kernel of which equal texts would not mean equal kernels."""


class Describer:
    """Feeds a hash with all that a kernel's lowering depends on, the same in every process."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._names: dict[int, int] = {}
        """Variables of jaxprs by id: the order in which they appear."""
        self._avals: dict[Any, int] = {}
        self._depth = 0

    def hexdigest(self) -> str:
        """Return the hash of all that was added."""
        return self._hash.hexdigest()

    def add(self, *values: Any) -> None:
        """Add values. Raises UnknownObjectError for one that has no description."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnknownObjectError("objects that hold each other")
        for value in values:
            self._add(value)
        self._depth -= 1

    def _text(self, text: str) -> None:
        self._hash.update(text.encode() + b"\0")

    def _add(self, value: Any) -> None:
        if type(value) in PLAIN:
            self._text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, jax.core.ShapedArray):
            # Most of a jaxpr's text are the same few shapes and types.
            new = value not in self._avals
            self._text(f"aval {self._avals.setdefault(value, len(self._avals))}")
            if new:
                self._add_object(value)
        elif isinstance(value, core.Jaxpr):
            self._add_jaxpr(value)
        elif isinstance(value, core.ClosedJaxpr):
            self.add("closed", value.jaxpr, list(value.consts))
        elif isinstance(value, core.Literal):
            self.add("literal", value.val, value.aval)
        elif isinstance(value, core.Var):
            first = id(value) not in self._names
            self._text(f"%{self._names.setdefault(id(value), len(self._names))}")
            if first:
                self.add(value.aval)
        elif isinstance(value, enum.Enum):
            self._text(f"{describe_type(type(value))}.{value.name}")
        elif isinstance(value, np.dtype | np.generic):
            self._text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, np.ndarray | jax.Array):
            array = np.asarray(value)
            if array.dtype == object:  # its bytes are addresses
                raise UnknownObjectError("an array of objects")
            self._text(f"array {array.shape} {array.dtype}")
            self._hash.update(array.tobytes())
        elif isinstance(value, jax.sharding.AbstractMesh | jax.sharding.Mesh):
            self.add("mesh", value.axis_names, tuple(value.shape.values()), value.axis_types)
            self.add(value.abstract_mesh.abstract_device)
        elif isinstance(value, type):
            self._text(f"type {describe_type(value)}")
        elif isinstance(value, tuple | list):
            self._text(f"{describe_type(type(value))} {len(value)}")
            self.add(*value)
        elif isinstance(value, dict | types.MappingProxyType):
            self._text(f"dict {len(value)}")
            for key in sorted(value, key=str):
                self.add(key, value[key])
        elif isinstance(value, set | frozenset):
            self._text(f"set {sorted(map(repr_of_process, value))}")
        elif isinstance(value, jax.tree_util.PyTreeDef):
            self._add_treedef(value)
        elif isinstance(value, functools.partial):
            self.add("partial", value.func, value.args, value.keywords)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | np.ufunc):
            self._text(f"builtin {value.__name__}")
        elif isinstance(value, types.MethodType):
            self.add("method", value.__func__, value.__self__)
        else:
            self._add_object(value)

    def _add_jaxpr(self, jaxpr: Any) -> None:
        self._text(f"jaxpr {jaxpr.debug_info.func_name} {len(jaxpr.eqns)}")
        self.add(list(jaxpr.constvars), list(jaxpr.invars))
        self._text(" ".join(sorted(describe_type(type(effect)) for effect in jaxpr.effects)))
        for equation in jaxpr.eqns:
            self._text(equation.primitive.name)
            self.add(list(equation.invars), list(equation.outvars), equation.params)
        self.add(list(jaxpr.outvars))

    def _add_treedef(self, treedef: Any) -> None:
        node = treedef.node_data()
        self._text(f"tree {treedef.num_leaves}")
        if node is not None:
            kind, data = node
            self.add(kind, data)
        self.add(*treedef.children())

    def _add_function(self, function: types.FunctionType) -> None:
        """A function of Python: its name and what it closes over."""
        name = f"{function.__module__}.{function.__qualname__}"
        if name.partition(".")[0] not in PACKAGES:  # what it calls may have changed since
            raise UnknownObjectError(f"the function {name}")
        code = function.__code__  # lambdas of one function share a name, perhaps a line
        self._text(f"function {name} {code.co_firstlineno}")
        self.add(code.co_code, code.co_names, [c for c in code.co_consts if type(c) in PLAIN])
        self.add(function.__defaults__, function.__kwdefaults__)
        try:
            self.add([cell.cell_contents for cell in function.__closure__ or ()])
        except ValueError as error:  # a cell that is still empty
            raise UnknownObjectError(str(error)) from error

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        if dataclasses.is_dataclass(value):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        elif kind.__module__.startswith(("jax.", "jaxlib.", "jax_", "jaxtrain")):
            fields = {
                name: getattr(value, name)
                for base in kind.__mro__
                for name in getattr(base, "__slots__", ())
                if hasattr(value, name) and name not in ("__weakref__", "__dict__", "_hash")
            }
            for name, field in list(getattr(value, "__dict__", {}).items()):
                # What an object remembers of itself depends on what was asked of it before.
                if name != "_hash" and not isinstance(
                    getattr(kind, name, None), functools.cached_property
                ):
                    fields[name] = field
        else:
            raise UnknownObjectError(f"a {describe_type(kind)}")
        self._text(f"object {describe_type(kind)}")
        self.add(fields if fields else repr_of_process(value))


def describe_type(kind: type) -> str:
    """Return a class's module and name."""
    return f"{kind.__module__}.{kind.__qualname__}"


def repr_of_process(value: object) -> str:
    """Return repr(value). Raises UnknownObjectError where it holds an address."""
    if " at 0x" in (text := repr(value)):
        raise UnknownObjectError(text)
    return text


@functools.cache
def describe_process() -> tuple[str, ...]:
    """Return what every kernel of a process depends on: versions and this package's sources."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    hashes = [hashlib.sha256(source.read_bytes()).hexdigest() for source in sources]
    return (jax.__version__, jaxlib.__version__, *hashes)


def describe_target(jax_mesh: Any) -> tuple[Any, ...]:
    """Return what jax asks of devices and switches while it lowers. jax_mesh: of a shard_map."""
    from jax.experimental.mosaic.gpu import core as gpu
    from jax.experimental.mosaic.gpu import utils

    # jax itself sets those that say where a package is installed.
    switches = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("MOSAIC_GPU")]
    switches = [s for s in switches if not s.partition("=")[0].endswith(("_ROOT", "_PATH"))]
    target = (utils._infer_arch(), jax.config.jax_enable_x64, *switches)
    if jax_mesh is None:
        return target
    target += (jax_mesh.axis_names, tuple(jax_mesh.shape.values()))
    if jax_mesh.size == 1:
        return target
    # How a kernel reaches other GPUs, for which it has a parameter even if it never does.
    alone = gpu.is_single_process_multi_device_topology() or not gpu.is_nvshmem_available()
    return (*target, alone, gpu._is_known_multihost_mesh(jax_mesh))


def hash_kernel(mesh, jax_mesh, *others: Any) -> str:
    """Return the key of a kernel, from what is lowered. Raises UnknownObjectError."""
    describer = Describer()
    describer.add(describe_process(), describe_target(jax_mesh), mesh, *others)
    return describer.hexdigest()


def keep_lowered(lowering: Any) -> None:
    """Have jax's module `lowering` of Mosaic kernels lower each kernel once from now on."""
    name = "lower_unpipelined_jaxpr_to_module"
    lower = getattr(lowering, name)
    modules: dict[str, bytes] = {}
    describe_process()  # now, since sources may change while a process runs

    @functools.wraps(lower)
    def lower_once(*arguments, **options):
        # A traceback gives locations in the source, which are left out.
        others = {name: options[name] for name in options if name != "outer_traceback"}
        try:
            key = hash_kernel(*arguments, others)
        except (UnknownObjectError, TypeError, AttributeError):  # the last two: no such object yet
            return lower(*arguments, **options)
        if key not in modules:
            path = find_file(key)
            data = path and read_sealed(path)
            if not data:
                result = lower(*arguments, **options)
                if result.profiler_spec is not None:
                    return result
                data = write_result(result)
                if path:
                    write_sealed(path, data)
            modules[key] = data
        # jax changes a module as it goes on, so that each call gets one that is new.
        return read_result(modules[key], lowering.LoweringResult)

    setattr(lowering, name, lower_once)


def write_result(result: Any) -> bytes:
    """Return a lowered kernel as bytes: a line of JSON and its module in MLIR's bytecode."""
    from jaxlib.mlir import ir, passmanager

    # Sizes may be numbers of numpy, which JSON does not take.
    facts: dict[str, Any] = {n: [*map(int, getattr(result, n))] for n in ("grid", "block")}
    for name in ("new_out_shapes", "gmem_scratch_shapes"):
        shapes = getattr(result, name)
        facts[name] = [[[int(n) for n in s.shape], jnp.dtype(s.dtype).name] for s in shapes]
    operation = result.module.operation
    with operation.context:
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(operation)
        if NAME in operation.attributes:
            name = ir.StringAttr(operation.attributes[NAME]).value
            operation.attributes[NAME] = ir.StringAttr.get(name.rstrip("0123456789"))
    code = io.BytesIO()
    operation.write_bytecode(code)
    return json.dumps(facts).encode() + b"\n" + code.getvalue()


def read_result(data: bytes, result: type) -> Any:
    """Return what `write_result` wrote, its module in the MLIR context at hand."""
    from jaxlib.mlir import ir

    line, code = data.split(b"\n", 1)
    facts = json.loads(line)
    for name in ("new_out_shapes", "gmem_scratch_shapes"):
        facts[name] = tuple(jax.ShapeDtypeStruct(*shape) for shape in facts[name])
    for name in ("grid", "block"):
        facts[name] = tuple(facts[name])
    return result(module=ir.Module.parse(code), profiler_spec=None, **facts)


def find_file(key: str) -> Path | None:
    """Return the file of a kernel beside jax's compiled programs, or None if none are kept."""
    folder = jax.config.jax_compilation_cache_dir
    if not folder or "://" in folder or not jax.config.jax_enable_compilation_cache:
        return None
    return Path(folder) / "mosaic" / key


def read_sealed(path: Path) -> bytes | None:
    """Return a file's contents; None if it is absent or not whole."""
    try:
        seal, data = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return data if seal.decode(errors="replace") == hashlib.sha256(data).hexdigest() else None


def write_sealed(path: Path, data: bytes) -> None:
    """Write a file whole, behind the hash of its contents; not at all where that fails."""
    file = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        os.replace(file.name, path)
    except OSError:  # costs the next process time, not this one its work
        with contextlib.suppress(OSError):
            if file is not None:
                os.unlink(file.name)
