"""The exceptions that end a run with a message instead of a traceback."""

from jaxtrain.text_safety import escape_control_chars, redact_text, shorten


class UserError(ValueError):
    """A mistake in a config, a data file, a checkpoint or a command line.

    The message names the key or file, what was found, what is allowed and what to do. `main`
    prints it without a traceback and exits with code 2. The message is escaped and shortened, so
    quoted input cannot add control characters or fill the screen, and passwords and keys in URLs
    are hidden.
    """

    def __init__(self, message: object = ""):
        super().__init__(shorten(redact_text(escape_control_chars(str(message)))))


class UnusableRow(UserError):
    """A single row cannot be used; others may be, so it is counted where rows are many."""


class RunStopped(Exception):
    """Training cannot go on (a loss that is not finite, say), through no mistake of a config.

    `main` prints the message and exits with code 1; whatever was saved before stays good.
    """

    def __init__(self, message: object = ""):
        super().__init__(shorten(redact_text(escape_control_chars(str(message)))))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device is out of memory."""
    # By name, so that verbs without devices need not import jax.
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)


def explain_memory(error: BaseException) -> str:
    """Return a message about an `is_out_of_memory` error: what jax says, and what to do."""
    cause = shorten(redact_text(escape_control_chars(str(error).strip().partition("\n")[0])), 300)
    return (
        f"a device is out of memory ({cause}). In training, data.micro_batch_size = 1,"
        ' model.remat = "full", optim.moments or an adapter take less, and --dry-run counts it'
        " (docs/how_to/fit_memory.md). Where answers are drawn, rollout.max_batch and"
        " sampling.max_new_tokens do"
    )


class Interrupted(Exception):
    """A wait was interrupted by a request to stop the run."""
