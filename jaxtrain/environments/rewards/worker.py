"""Process that runs reward functions: `python -m jaxtrain.environments.rewards.worker FD`.

It answers (name, arguments) with a `WorkerReply`: "ok" and numbers, "user" and a message for a
mistake of the user, "not_finite" and a message, or "error", a text and the traceback. It ends with
its parent, even while a function hangs.
"""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection

from jaxtrain import plugins
from jaxtrain.environments.rewards.load import NonFiniteReward, call_function, find_function
from jaxtrain.environments.rewards.pool import WorkerReply
from jaxtrain.errors import UserError


def serve(connection: Connection) -> None:
    """Answer calls until the pipe is closed."""
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            return
        connection.send_bytes(answer(name, arguments).to_bytes())


def answer(name: str, arguments: dict | None) -> WorkerReply:
    """Return the reply to a call; without arguments the function is only looked up."""
    try:
        function = find_function(name)
        return WorkerReply("ok", None if arguments is None else call_function(function, arguments))
    except UserError as error:
        return WorkerReply("user", str(error))
    except NonFiniteReward as error:
        return WorkerReply("not_finite", str(error))
    except plugins.FAILURES as error:  # anything that a user's function may raise
        return WorkerReply("error", plugins.describe(error), plugins.trace(error))


def follow(parent: int) -> None:
    """Exit as soon as the parent process has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    serve(Connection(int(sys.argv[1])))
