"""Entry point: train from a config, or run one of the verbs around it.

Heavy imports happen inside the verb that needs them, so `--help` and mistakes answer at once.
"""

import importlib.util
import io
import os
import sys
import traceback
from importlib.metadata import EntryPoint
from typing import Any

import jaxtrain
from jaxtrain import light_transformers, plugins
from jaxtrain.arguments import HelpPrinted
from jaxtrain.cli import VERBS
from jaxtrain.errors import RunStopped, UserError, explain_memory, is_out_of_memory
from jaxtrain.text_safety import escape_control_chars, show

NO_TRITON = "--xla_gpu_enable_triton_gemm=false"
"""XLA would try kernels of its own for each matmul; this leaves cuBLAS. On an H200 that was as fast
or a few percent faster in all that was timed (docs/kernels.md), and sooner compiled: products in
FP8 take 17 s in the place of more than 170."""


def main(argv: list[str]) -> int:
    """Run one command line; returns the exit code (2: a mistake that the user can fix)."""
    # Text that the terminal's encoding does not have is shown as escapes.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    # transformers would warn about a missing PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    leave_matmuls()
    verb, rest = "train", argv
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        verb, rest = argv[0], argv[1:]
    places = {"train": "jaxtrain.cli.train:run_train"}
    places |= {name: verb.function for name, verb in VERBS.items()}
    try:
        if argv == ["--version"]:
            return print_version()
        if verb not in places:
            brought = [entry.name for entry in plugins.list_entry_points("verbs")]
            if verb not in brought:
                names = ", ".join([*places, *brought])
                raise UserError(f"unknown verb {show(verb)}; the verbs are {names}")
            return plugins.find("verbs", verb, {}, key="verb")(rest) or 0
        return EntryPoint(verb, places[verb], "verbs").load()(rest) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunStopped as stop:
        print(f"stopped: {stop}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        print(f"stopped: {explain_memory(error)}", file=sys.stderr)
        return 1
    except HelpPrinted:
        raise
    except SystemExit as error:  # of a plugin: a run that it ends is none that succeeded
        print(f"stopped: {plugins.describe(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before training watches the signals itself
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 0


def leave_matmuls() -> None:
    """Set XLA's flag NO_TRITON for this process, before jax reads it, and those that it starts."""
    flags = os.environ.get("XLA_FLAGS", "")
    on_tpu = importlib.util.find_spec("libtpu") is not None  # which knows other flags
    names_file = flags.strip()[:1] not in ("", "-")  # XLA reads its flags there
    if "xla_gpu_enable_triton_gemm" not in flags and not on_tpu and not names_file:
        os.environ["XLA_FLAGS"] = f"{flags} {NO_TRITON}".strip()


def print_version() -> int:
    """Print the versions that are installed."""
    import importlib.metadata
    import platform

    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "flax")]
    jaxtrain_version = f"jaxtrain {jaxtrain.__version__}, python {platform.python_version()}"
    print(", ".join([jaxtrain_version, *versions]))
    return 0


def show_bug(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Print a traceback, escaping control characters in untrusted text."""
    print(
        escape_control_chars("".join(traceback.format_exception(kind, error, trace))),
        file=sys.stderr,
    )


def entry() -> None:
    """Console-script entry point."""
    sys.excepthook = show_bug
    light_transformers.install()
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    entry()
