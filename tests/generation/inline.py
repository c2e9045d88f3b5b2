"""Processes of a cluster without processes: objects behind pickled messages that can be killed."""

import asyncio
import inspect
import pickle
import threading
from concurrent.futures import Future

from jaxtrain.generation.ray.remote import RemoteLost
from jaxtrain.generation.ray.service import RolloutService


class Inline:
    """`Far` over an object that `make` makes again when it was ended. Coroutines run in a loop of
    its own, other methods in threads, as in Ray's actors."""

    def __init__(self, make):
        self.make, self.ends = make, 0
        self.calls, self.error = [], None
        self.silent = threading.Event()
        """While set, calls are not answered: the process hangs."""
        self._waiting = set()
        self._start()

    def _start(self):
        self.made = self.make()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def call(self, name, *arguments):
        self.calls.append(name)
        answer, created, loop = Future(), self.made, self._loop
        arguments = pickle.loads(pickle.dumps(arguments))
        self._waiting.add(answer)

        def give(value=None, error=None):
            if self.silent.is_set() or created is not self.made or answer.done():
                return
            self._waiting.discard(answer)
            if error is None:
                answer.set_result(pickle.loads(pickle.dumps(value)))
            else:
                answer.set_exception(error)

        method = getattr(created, name)
        if inspect.iscoroutinefunction(method):
            task = asyncio.run_coroutine_threadsafe(method(*arguments), loop)
            task.add_done_callback(
                lambda t: (
                    t.cancelled()
                    or give(*((None, t.exception()) if t.exception() else (t.result(),)))
                )
            )
        else:

            def run():
                try:
                    give(method(*arguments))
                except BaseException as error:
                    give(error=error)

            threading.Thread(target=run, daemon=True).start()
        return answer

    def end(self):
        """The process dies, and another takes its place."""
        self.ends += 1
        waiting, self._waiting = self._waiting, set()
        self.silent.clear()
        self.stop()
        self._start()
        for answer in waiting:
            if not answer.done():
                answer.set_exception(RemoteLost("its process ended"))

    def stop(self):
        """Leave no thread behind."""
        if isinstance(self.made, RolloutService):
            self.made._drop()
        self._loop.call_soon_threadsafe(self._loop.stop)
