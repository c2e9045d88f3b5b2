"""Requests of one model, run in the order of their numbers, each once.

POST ─> log (on disk) ─> id          waiting ─> next number ─> device's thread ─> log ─> result
                                        └─ a number that does not come within GAP_SECONDS: those
                                           behind it fail, and later ones go on

A model that is needed after a restart begins from its newest snapshot, and what the log holds
behind it is run again, by the same programs in the same order, so that the weights come out bit by
bit.
"""

import asyncio
import hashlib
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError, is_out_of_memory
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.text_safety import escape_control_chars
from jaxtrain.training_api.futures import ERROR, SERVER, USER, Entry, Result, read_entries
from jaxtrain.training_api.journal import Journal, Record
from jaxtrain.training_api.operations import Operations
from jaxtrain.training_api.trainer import TrainedModel

FAIL_WITH_EFFECT = ("create_model", "optim_step")
"""Operations that change something even where they fail: the reason why there is no model, and the
gradients, which are dropped."""
GAP_SECONDS = 60.0
"""Longest wait of a request for one with a lower number."""
MAX_WAITING, MAX_SEQ_ID = 1024, 2**31 - 1
MAX_RESTARTS = 8
"""Servers that may end while they run a request again, or bring a model back; the next one refuses
it."""
OPENING = "opening"
"""File with the number of servers in a row that have ended while they brought the model back."""
SNAPSHOT_SECONDS, SNAPSHOT_BYTES = 60.0, 1 << 28
"""A step that ends that long after the last snapshot is followed by one; a request that begins when
the log has grown by that much is preceded by one, unless there are gradients for a step."""
RETRY_SECONDS = 5.0
"""Between two tries to write a result to a disk that is full."""
RETENTION_SECONDS = 3600.0
"""Time that a result stays after it was read."""
MAX_READ_BYTES = 1 << 26
"""Size of the results that stay after they were read, of a model; older ones go first."""
UNREAD_SECONDS = 86_400.0
"""Time that a result stays if it is not read."""


class SetAside(UserError):
    """Too many servers have ended while they brought a model back."""


class ModelQueue:
    """Model with its requests; its methods run in the event loop."""

    def __init__(self, operations: Operations, journal: Journal, thread: ThreadPoolExecutor):
        self.operations, self.journal, self.thread = operations, journal, thread
        self.broken = ""
        """Reason why the model cannot be opened; empty: it can."""
        self._set_aside = False
        """True if it is tried again once its file of servers that have ended is removed."""
        records = []
        try:
            records = journal.read()
        except UserError as error:
            self.broken = str(error)
            print(escape_control_chars(self.broken), file=sys.stderr)
        self.entries, self._order = read_entries(records)
        self.waiting = {seq: entry for seq, entry in self.entries.items() if entry.result is None}
        """Requests that have not ended, by number."""
        self.next_seq = max(self._order, default=-1) + 1
        self._interrupted = self.next_seq if self.next_seq in self.waiting else None
        """Number of the request that an earlier server may have been running when it ended."""
        self._loaded, self._loading = False, asyncio.Lock()
        self._read: deque[tuple[float, Entry]] = deque()
        self._read_bytes = 0
        self._ended = deque(self.entries[seq_id] for seq_id in self._order)
        """Entries whose results may be held, by the times at which they ended."""
        self._snapshot_at, self._snapshot_size = time.monotonic(), 0
        """Time of the last snapshot, and the size of the log after it."""
        self._arrived = asyncio.Event()
        self._worker: asyncio.Task | None = None

    def start(self) -> None:
        """Begin to run requests."""
        self._worker = asyncio.ensure_future(self._work())

    async def close(self) -> None:
        """Stop after the request that is being run."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            await asyncio.get_running_loop().run_in_executor(self.thread, lambda: None)
        self.journal.close()

    def check(self) -> None:
        """Raise RequestRefused for a model that cannot be opened."""
        if self._set_aside and not (self.operations.folder / OPENING).exists():
            self._try_again()
        if self.broken:
            raise RequestRefused(409, f"the model cannot be opened: {self.broken}", "model_id")

    def _try_again(self) -> None:
        """Run what waits again, as a restart of the server does: the log has no results of it."""
        self.broken, self._set_aside = "", False
        for entry in self.waiting.values():
            entry.result, entry.done = None, asyncio.Event()
        self.next_seq = max(self._order, default=-1) + 1
        self.start()

    async def submit(self, seq_id: Any, operation: str, payload: bytes) -> Entry:
        """Accept a request; the same one again is the same entry. RequestRefused."""
        if type(seq_id) is not int or not 0 <= seq_id <= MAX_SEQ_ID:
            raise RequestRefused(
                400, f"seq_id must be a whole number from 1 to {MAX_SEQ_ID}", "seq_id"
            )
        digest = hashlib.sha256(operation.encode() + b"\0" + payload).hexdigest()
        while (entry := self.entries.get(seq_id)) is not None:
            if entry.digest != digest:
                raise RequestRefused(
                    409, f"seq_id {seq_id} was sent with another body before", "seq_id"
                )
            await entry.logged.wait()
            if self.entries.get(seq_id) is entry:
                return entry
        self.check()
        if len(self.waiting) >= MAX_WAITING:
            raise RequestRefused(429, f"{MAX_WAITING:,} requests of this model are waiting")
        entry = Entry(f"{self.operations.model_id}/{seq_id}", seq_id, operation, digest, payload)
        # Before the log is on disk: the same request may come again meanwhile.
        self.entries[seq_id] = entry
        # A client that hangs up cancels this, but not what it has begun: the log holds the request.
        await asyncio.shield(self._accept(entry))
        return entry

    async def _accept(self, entry: Entry) -> None:
        """Log a request and let it be run; RequestRefused."""
        try:
            await asyncio.to_thread(self.journal.append, entry.request_record())
        except OSError as error:
            del self.entries[entry.seq_id]
            raise RequestRefused(503, f"the log cannot be written: {error.strerror}") from None
        finally:
            entry.note_logged()
        self.waiting[entry.seq_id] = entry
        if self.broken:
            entry.end(self._lost())
        elif entry.seq_id < self.next_seq:
            await self._refuse_late(entry)
        self._arrived.set()

    async def _refuse_late(self, entry: Entry) -> None:
        await self._end(entry, Result.error(f"seq_id {entry.seq_id} came too late"), ran=False)

    def _lost(self) -> Result:
        return Result.error(f"the model cannot be opened: {self.broken}", SERVER)

    async def _work(self) -> None:
        """Run requests until cancelled."""
        # An earlier server was killed before it had refused these.
        for entry in list(self.waiting.values()):
            if entry.seq_id < self.next_seq:
                await self._refuse_late(entry)
        while not self.broken:
            entry = await self._next()
            try:
                await self.load()
                if entry.result is None:
                    await self._end(entry, await self._run_counted(entry))
            # What _open has printed; a later server may succeed, so the log is left as it is.
            except Exception as error:
                self.broken = f"{type(error).__name__}: {error}"
                self._set_aside = isinstance(error, SetAside)
                for waiting in self.waiting.values():
                    waiting.end(self._lost())
            self.next_seq = entry.seq_id + 1
            self._forget_results()

    async def show(self) -> TrainedModel | None:
        """Return the model, brought into memory; None: it was not created. RequestRefused for one
        that cannot be opened."""
        self.check()
        try:
            await self.load()
        # What _open has printed.
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise RequestRefused(409, f"the model cannot be opened: {cause}", "model_id") from None
        return self.operations.model

    async def load(self) -> None:
        """Bring the model into memory, as it was when the log ended; errors of opening it are
        raised."""
        async with self._loading:
            if not self._loaded:
                await self._in_thread(self._open)
                self._loaded = True
                for entry in [e for e in self.waiting.values() if e.result is not None]:
                    self.waiting.pop(entry.seq_id)
                    entry.note_end()

    async def unload(self) -> None:
        """Take a model that has nothing to do out of memory; the next request brings it back."""
        async with self._loading:
            if self._loaded and not self.waiting and not self.operations.pending:
                # First: if this is cancelled, the thread goes on, and the next `load` follows it.
                self._loaded = False
                await self._in_thread(self._leave)

    def _open(self) -> None:
        """Replay; what fails leaves the model closed, and the log as it is."""
        try:
            self._count_servers()
            try:
                self._replay()
            finally:
                (self.operations.folder / OPENING).unlink(missing_ok=True)
        # A damaged file, a full device: the other models must go on.
        except Exception:
            print(escape_control_chars(traceback.format_exc()), file=sys.stderr)
            raise

    def _count_servers(self) -> None:
        """Count this server among those that may end in a replay; SetAside if too many have."""
        file = self.operations.folder / OPENING
        ended = int(file.read_text()) if file.exists() else 0
        if ended >= MAX_RESTARTS:
            raise SetAside(
                f"{ended} servers ended while they brought {self.operations.model_id} back (the"
                " system may have killed them for memory); it is left closed, and other models go"
                f" on. To try again, say on a larger machine, remove {file}"
            )
        try:
            write_atomically(file, str(ended + 1))
        except OSError as error:  # a full disk: the model is needed all the same
            print(f"{file} cannot be written: {error}", file=sys.stderr)

    def _leave(self) -> None:
        if self.operations.model is not None:
            self._try_snapshot({"seq_id": self.next_seq - 1})
        self.operations.forget()

    async def _next(self) -> Entry:
        while True:
            self._arrived.clear()
            entry = self.entries.get(self.next_seq)
            if entry is not None:
                # Its record must precede that of its result, and it may yet be refused.
                await entry.logged.wait()
                if self.entries.get(self.next_seq) is not entry:
                    continue
                if entry.result is None:
                    return entry
                self.next_seq += 1
                continue
            # In order: a kill in between leaves those that still wait above the next number.
            behind = sorted(self.waiting.values(), key=lambda entry: entry.seq_id)
            try:
                wait = None
                if behind:
                    oldest = min(entry.arrived for entry in behind)
                    wait = max(0.0, oldest + GAP_SECONDS - time.monotonic())
                await asyncio.wait_for(self._arrived.wait(), wait)
            except TimeoutError:
                reason = f"seq_id {self.next_seq} did not come within {GAP_SECONDS:.0f} s"
                self.operations.drop(reason)
                self.next_seq = max(self.next_seq, behind[-1].seq_id + 1)
                for entry in behind:
                    await self._end(entry, Result.error(reason), ran=False)

    async def _end(self, entry: Entry, result: Result, ran: bool = True) -> None:
        """Log a result, then hand it out."""
        entry.ran, entry.result = ran, result
        await self._append(entry.result_record())
        self._order.append(entry.seq_id)
        self.waiting.pop(entry.seq_id, None)
        entry.end(result)
        self._ended.append(entry)

    async def _append(self, record: Record) -> None:
        """Log a record; wait while the disk is full."""
        while True:
            try:
                return await asyncio.to_thread(self.journal.append, record)
            except OSError as error:
                print(f"{self.journal.path} cannot be written: {error}", file=sys.stderr)
                await asyncio.sleep(RETRY_SECONDS)

    def note_read(self, entry: Entry) -> None:
        """Note that a result was read: it stays for RETENTION_SECONDS more."""
        if entry.read_at is None:
            entry.read_at = time.monotonic()
            self._read.append((entry.read_at, entry))
            assert entry.result is not None
            self._read_bytes += 0 if entry.result.kind == ERROR else len(entry.result.body)

    async def _in_thread(self, work: Any, *args: Any) -> Any:
        loop = asyncio.get_running_loop()
        return await asyncio.shield(loop.run_in_executor(self.thread, work, *args))

    async def _run_counted(self, entry: Entry) -> Result:
        """Run a request unless it has ended too many servers."""
        if entry.seq_id != self._interrupted:
            return await self._in_thread(self._run, entry)
        if entry.restarts >= MAX_RESTARTS:
            cause = (
                f"{entry.operation} of seq_id {entry.seq_id} is refused: {entry.restarts + 1}"
                " servers ended while they ran it (the system may have killed them for memory);"
                " shorter data or a larger machine may help"
            )
            print(f"{self.operations.model_id}: {cause}", file=sys.stderr)
            return await self._in_thread(self._fail, entry, Result.error(cause, SERVER))
        entry.restarts += 1
        await self._append(entry.restart_record())
        return await self._in_thread(self._run, entry)

    def _run(self, entry: Entry) -> Result:
        """Run a request; called by the device's thread."""
        # Before and not after: whatever fills the log, forward passes that are followed by no step
        # and requests that fail included, the state is that of the request before.
        if self._log_has_grown() and self.operations.model is not None:
            self._try_snapshot({"seq_id": entry.seq_id - 1})
        try:
            result = Result.of(self.operations.run(entry.operation, entry.id, entry.payload))
        except UserError as error:
            return self._fail(entry, Result.error(str(error)))
        # What a client sends must not end the server: whatever else goes wrong is the answer.
        except Exception as error:
            print(escape_control_chars(traceback.format_exc()), file=sys.stderr)
            cause = type(error).__name__
            if is_out_of_memory(error):
                cause = "a device is out of memory; shorter data and fewer models take less"
            failed = Result.error(f"the server failed: {cause}", SERVER)
            # The step may have donated the state that it did not replace.
            self.operations.forget()
            self._open()
            return self._fail(entry, failed)
        if self._wants_snapshot(entry.operation):
            cursor = {"seq_id": entry.seq_id, "kind": result.kind, "body": result.body.decode()}
            self._try_snapshot(cursor)
        self._drop_body(entry)
        return result

    def _drop_body(self, entry: Entry) -> None:
        """Drop the body of a forward pass that has succeeded: no restart runs it again."""
        if entry.operation == "forward_backward" and not self.operations.adds_gradients(
            entry.operation, entry.payload
        ):
            entry.payload = b""

    def _fail(self, entry: Entry, result: Result) -> Result:
        if self.operations.adds_gradients(entry.operation, entry.payload):
            self.operations.drop(f"forward_backward of seq_id {entry.seq_id} failed")
        return result

    def _wants_snapshot(self, operation: str) -> bool:
        if operation == "load_weights":
            return True
        late = time.monotonic() - self._snapshot_at > SNAPSHOT_SECONDS
        return operation == "optim_step" and late

    def _log_has_grown(self) -> bool:
        grown = self.journal.size - self._snapshot_size > SNAPSHOT_BYTES
        return grown and not self.operations.pending

    def _try_snapshot(self, cursor: dict[str, Any]) -> None:
        """Write the state after an entry, and drop the bodies of what was run up to it. cursor:
        with its result, where that is not in the log yet."""
        self._snapshot_at = time.monotonic()
        try:
            self.operations.save_snapshot(cursor)
            for entry in list(self.entries.values()):
                if entry.seq_id <= cursor["seq_id"]:
                    entry.payload = b""
            self.journal.rewrite(self._records())
        except (UserError, OSError) as error:  # the log goes on from the older one
            print(f"{self.operations.folder}: no snapshot: {error}", file=sys.stderr)
        self._snapshot_size = self.journal.size

    def _records(self) -> Iterator[Record]:
        # Read while the log is locked: a request that is logged meanwhile is among the entries, or
        # its record is appended to the new log.
        for entry in list(self.entries.values()):
            yield entry.request_record()
            if entry.restarts and entry.result is None:
                yield entry.restart_record()
        for seq_id in list(self._order):
            yield self.entries[seq_id].result_record()

    def _replay(self) -> None:
        """Bring the model to where the log ends; called by the device's thread."""
        cursor = self.operations.open_snapshot()
        first = 0
        if cursor is not None:
            first = cursor["seq_id"] + 1
            entry = self.entries[cursor["seq_id"]]
            if entry.result is None:  # killed between the snapshot and the log
                entry.result = Result(cursor["kind"], cursor["body"].encode())
                self.journal.append(entry.result_record())
                self._order.append(entry.seq_id)
        reached = -1
        for seq_id in self._order:
            entry, late = self.entries[seq_id], seq_id < reached
            reached = max(reached, seq_id)
            if seq_id < first:
                continue
            assert entry.result is not None
            if not entry.ran:
                # A request that came too late has dropped nothing.
                if not late:
                    self.operations.drop(entry.result.message)
                continue
            failed = entry.result.kind == ERROR
            # The server's own failures have changed nothing, see `_run`, and may occur again;
            # weights that could not be loaded may exist by now.
            skipped = failed and (
                entry.result.category != USER or entry.operation not in FAIL_WITH_EFFECT
            )
            if not skipped:
                try:
                    self.operations.run_again(entry.operation, entry.id, entry.payload)
                except UserError:
                    if not failed:  # another base or other options: the numbers would differ, too
                        raise
            if failed:
                self._fail(entry, entry.result)
            elif entry.payload:
                self._drop_body(entry)

    def _forget_results(self) -> None:
        """Drop results that were read long ago, or before many others, or were not read for a day;
        their requests stay known."""
        now = time.monotonic()
        # The last one stays whatever its size: a client whose connection broke asks again.
        while len(self._read) > 1 and (
            self._read_bytes > MAX_READ_BYTES or now - self._read[0][0] > RETENTION_SECONDS
        ):
            self._read_bytes -= self._read.popleft()[1].drop_result()
        while self._ended and now - (self._ended[0].ended_at or now) > UNREAD_SECONDS:
            entry = self._ended.popleft()
            if entry.read_at is None:
                entry.drop_result()
