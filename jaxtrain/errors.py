"""The one exception that means: the user can fix this, and the message says how."""


class UserError(ValueError):
    """A mistake in a config, a data file, a checkpoint or a command line.

    The message names the key or file, what was found, what is allowed and what to do. `main`
    prints it without a traceback and exits with code 2.
    """
