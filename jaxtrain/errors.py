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


class Interrupted(Exception):
    """A wait was interrupted by a request to stop the run."""
