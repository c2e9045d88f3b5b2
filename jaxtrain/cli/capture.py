"""Verb capture: the target of a draft runs for its states alone, onto disk or for others to ask."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

from jaxtrain.cli.listen import HOST, add_key_file, listening, read_key, require_key
from jaxtrain.cli.processes import config_parser, read_config, run_together
from jaxtrain.errors import UserError

if TYPE_CHECKING:
    from jaxtrain.config import Config

PORT = 8100


def run_capture(argv: list[str]) -> int:
    """Write the target's states of all samples of a config's data to task.target.path, or answer
    with those of batches (task.target.source "server")."""
    parser = config_parser("capture")
    parser.add_argument("--host", help=f"server: address to listen on (default {HOST})")
    parser.add_argument("--port", type=int, help=f"server: default {PORT}; 0: any free one")
    add_key_file(parser)
    args = parser.parse_intermixed_args(argv)

    def work(config) -> int:
        if require_source(config, args) == "server":
            serve(config, args)
        else:
            capture(config)
        return 0

    return run_together(lambda: read_config(args), lambda config: (config.parallel, None), work)


def require_source(config: Config, args: argparse.Namespace) -> str:
    """Return task.target.source; UserError for one that capture has no part in, for a task without,
    and for options that it does not read."""
    from jaxtrain.methods.drafts.config import DraftTask

    if not isinstance(config.task, DraftTask):
        raise UserError(
            f'task.kind "{config.task.kind}" reads no target states; capture is for "dflash" and'
            ' "eagle3"'
        )
    source = config.task.target.source
    if source not in ("disk", "server"):
        raise UserError(
            f'task.target.source is "{source}"; set it to "disk" and task.target.path to the folder'
            ' that shall hold the states, or to "server" to answer with them'
        )
    if source == "disk" and (args.host, args.port, args.api_key_file) != (None, None, None):
        raise UserError(
            "capture: --host, --port and --api-key-file are read with task.target.source"
            ' "server"; remove them'
        )
    return source


def capture(config: Config) -> None:
    """Write the states of a config's data where its training will read them; goes on with a capture
    that was interrupted."""
    import jax

    from jaxtrain.distributed.mesh import is_main_process
    from jaxtrain.methods.drafts.drafting import DraftData
    from jaxtrain.methods.drafts.stored_states import StoredStates
    from jaxtrain.methods.registry import make_task

    task = make_task(config)
    data = task.data
    assert isinstance(data, DraftData) and isinstance(data.stage, StoredStates)

    def log(text: str) -> None:
        if is_main_process():
            print(text, flush=True)

    data.log = log
    with jax.set_mesh(task.mesh):
        data.stage.capture(data, log)


def serve(config: Config, args: argparse.Namespace) -> None:
    """Answer with the states of a config's target on the devices of this process, until a signal
    asks to end."""
    import jax

    from jaxtrain.environments.endpoint_app import EndpointApp
    from jaxtrain.methods.drafts.capture import FrozenTarget
    from jaxtrain.methods.drafts.draft_model import assemble_target
    from jaxtrain.methods.drafts.state_server import StateServer

    host, port = args.host or HOST, PORT if args.port is None else args.port
    key = read_key(args.api_key_file)
    require_key(host, key)
    if not 0 <= port < 65536:
        raise UserError(f"capture: --port {port} must be 0 to 65535")
    if jax.process_count() > 1:
        raise UserError(
            "capture: a server is one process; start each with"
            ' parallel.launcher="none", and name all in task.target.servers'
        )
    target = FrozenTarget(assemble_target(config), (), last=False, seed=config.run.seed)
    with jax.set_mesh(target.bundle.mesh):
        target.open()

    async def run() -> None:
        app = EndpointApp(StateServer(target).routes(), key)
        async with listening(app, host, port) as (url, ended):
            print(
                f"serving states of {config.model.path or 'a model of random weights'} at {url}",
                flush=True,
            )
            await ended.wait()

    asyncio.run(run())
