"""Process that runs reward functions: `python -m jaxtrain.environments.rewards.worker FD`.

It answers (name, arguments) with ("ok", numbers), ("user", message) for a mistake of the user,
("not_finite", message), or ("error", text, traceback). It ends with its parent, even while a
function hangs.
"""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from jaxtrain import plugins
from jaxtrain.environments.rewards.load import NonFiniteReward, call_function, find_function
from jaxtrain.errors import UserError


def serve(connection: Connection) -> None:
    """Answer calls until the pipe is closed."""
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(answer(name, arguments))


def answer(name: str, arguments: dict | None) -> tuple:
    """Return the reply to a call; without arguments the function is only looked up."""
    try:
        function = find_function(name)
        return "ok", None if arguments is None else call_function(function, arguments)
    except UserError as error:
        return "user", str(error)
    except NonFiniteReward as error:
        return "not_finite", str(error)
    except Exception as error:  # anything that a user's function may raise
        return "error", plugins.describe(error), plugins.trace(error)


def follow(parent: int) -> None:
    """Exit as soon as the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
