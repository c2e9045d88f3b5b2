"""The verb `serve`: a model behind HTTP in OpenAI's form; of a run that trains its newest weights.

main thread: event loop ── requests ── tokens ──> LocalEngine of each policy
thread "sampler": one chunk of tokens at a time, scores of prompts
thread: a newer checkpoint is read ──> replaces the weights between two requests
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.arguments import Parser, add_model, expand_path
from jaxtrain.cli.listen import HOST, KEY_VARIABLE, add_key_file, listening, read_key, require_key
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

if TYPE_CHECKING:
    from jaxtrain.api import Model
    from jaxtrain.generation.local.engine import LocalEngine
    from jaxtrain.generation.serving.adapters import AdapterLoader
    from jaxtrain.generation.serving.answerer import ServedModel
    from jaxtrain.training_api.routes import TrainingApi

POLL_SECONDS = 5.0
"""Between two looks for a newer checkpoint."""


def run_serve(argv: list[str]) -> None:
    """Answer requests in OpenAI's form with a run's newest checkpoint or a Hugging Face model."""
    parser = Parser("jaxtrain serve", description=run_serve.__doc__)
    add_model(parser, "section.key=value, such as model.compute_dtype=bfloat16")
    parser.add_argument("--host", default=HOST, help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--served-model-name", help="its name in requests; default: the folder's")
    add_key_file(parser)
    parser.add_argument(
        "--max-model-len",
        type=int,
        default=4096,
        help="tokens of the longest sequence, prompt and answer; at most the model's",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        help="most answers that are drawn at once; default: what the memory has room for",
    )
    parser.add_argument(
        "--prefix-cache",
        type=int,
        metavar="N",
        help="conversations whose states stay in memory, so that their next turn reads only what is"
        " new; 0: none; default: a quarter of --max-num-seqs",
    )
    parser.add_argument(
        "--draft", type=os.path.expanduser, help="folder of a draft model (dflash, eagle3), or mtp"
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="serve an adapter of the model, too, under a name; may be given several times",
    )
    parser.add_argument(
        "--max-loras",
        type=int,
        metavar="N",
        help="let requests load and unload adapters, at most N at once with those of --lora, by"
        " vLLM's routes; needs a key",
    )
    parser.add_argument(
        "--train",
        type=expand_path,
        metavar="FOLDER",
        help="let clients train in the form of Tinker's API too; what they train is kept there",
    )
    parser.add_argument(
        "--image-host",
        action="append",
        default=[],
        help="host whose URLs of images are fetched; may be given several times. Without it images"
        " come as data URLs alone",
    )
    args = parser.parse_intermixed_args(argv)
    if (
        args.max_model_len < 2
        or (1 if args.max_num_seqs is None else args.max_num_seqs) < 1
        or (args.prefix_cache or 0) < 0
        or not 0 <= args.port < 65536
    ):
        raise UserError(
            "serve: --max-model-len is at least 2, --max-num-seqs at least 1, --prefix-cache at"
            " least 0, --port 0 to 65535"
        )
    key = read_key(args.api_key_file)
    require_key(args.host, key)
    adapters = read_adapters(args, key)

    from jaxtrain.api import Model

    model = Model(args.model, args.overrides, several=True)
    model.require_language()
    model.max_len = min(model.max_len, args.max_model_len)
    if args.train is not None:
        from jaxtrain.training_api.trainer import without_new_adapter

        model.snapshot = without_new_adapter(model.snapshot)
    with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:
        asyncio.run(serve(args, model, key, thread, adapters))


def read_adapters(args: argparse.Namespace, key: str | None) -> dict[str, str]:
    """Return the folders of --lora by name; UserError."""
    adapters: dict[str, str] = {}
    for word in args.lora:
        name, separator, folder = word.partition("=")
        if not (separator and name and folder) or not name.isprintable():
            raise UserError(f"--lora {show(word)} must be NAME=FOLDER")
        if name in {*adapters, args.served_model_name or Path(args.model).name}:
            raise UserError(f"--lora {show(name)}: the name is taken; give each model its own")
        adapters[name] = os.path.expanduser(folder)
    if args.max_loras is not None and (args.max_loras < max(1, len(adapters)) or key is None):
        raise UserError(
            f"--max-loras {args.max_loras} must be at least 1 and the number of --lora, and lets"
            f" requests read folders, so it needs a key: set {KEY_VARIABLE}, or name a file with"
            " --api-key-file"
        )
    if adapters or args.max_loras:
        for option, cause in (("draft", "--draft"), ("train", "--train")):
            if getattr(args, option):
                raise UserError(f"serve: --lora and --max-loras do not go with {cause}")
        if (Path(args.model) / "checkpoints").is_dir():
            raise UserError(
                f"serve: --lora and --max-loras are for a model folder, and {args.model} is a run,"
                f" whose weights may change; name {Path(args.model) / 'model'}"
            )
    return adapters


async def serve(
    args: argparse.Namespace,
    model: "Model",
    key: str | None,
    thread: ThreadPoolExecutor,
    adapters: Mapping[str, str],
) -> None:
    """Serve until a signal asks to end."""
    from jaxtrain.environments.endpoint_app import EndpointApp
    from jaxtrain.generation.serving.adapters import AdapterRoutes
    from jaxtrain.generation.serving.answerer import PUBLIC, Answerer
    from jaxtrain.generation.serving.open_request import ServingFormat

    name = args.served_model_name or Path(args.model).name
    engines, models = open_models(model, name, args, thread)
    loader, served_models = None, list(models)
    if adapters or args.max_loras:
        loader = open_loader(model, args, engines[0], thread)
        served_models += [loader.load(word, folder, name) for word, folder in adapters.items()]
    names = ", ".join(served.name for served in served_models)
    form = ServingFormat(model.tokenizer, model.vocab_size, model.max_len, args.image_host)
    training = None
    if args.train is None:
        answerer, public = Answerer(form, served_models, log=log), PUBLIC
        routes = answerer.routes()
        if args.max_loras and loader is not None:
            routes += AdapterRoutes(answerer, loader, thread, args.max_loras).routes()
    else:
        from jaxtrain.training_api.routes import PUBLIC as TRAINING_PUBLIC

        training = open_training(model, name, args, engines[0], thread)
        answerer = Answerer(form, served_models, log=log, find_other=training.find_served)
        routes = [*answerer.routes(), *training.routes()]
        public = (*PUBLIC, *TRAINING_PUBLIC)
        training.start()
    # Only the answerer holds adapters from here on, so that unloading one frees its memory.
    del served_models
    app = EndpointApp(routes, key, public)
    try:
        async with listening(app, args.host, args.port) as (url, ended):
            print(f"serving {names} ({models[0].version}) at {url}/v1", flush=True)
            following = asyncio.ensure_future(follow(model, models, engines))
            await ended.wait()
            following.cancel()
    finally:
        if training is not None:
            await training.close()
        for engine in {*engines, *(served.engine for served in answerer.models.values())}:
            await engine.close()


def open_models(
    model: "Model", name: str, args: argparse.Namespace, thread: ThreadPoolExecutor
) -> "tuple[list[LocalEngine], list[ServedModel]]":
    """Return the engine of each policy, or of the only one, and what it is in requests."""
    from jaxtrain.generation.local.engine import LocalEngine
    from jaxtrain.generation.serving.answerer import ServedModel

    policies = list(model.policies) or [None]
    if args.draft and model.policies:
        raise UserError(f"{model.name} has trained several policies, for which no draft guesses")
    engines, models = [], []
    for policy in policies:
        sampler = model.sampler(True, args.draft, policy, args.max_num_seqs, args.prefix_cache)
        sampler.use(split_layers(model, sampler.model), model.snapshot.step)
        engine = LocalEngine(sampler, thread)
        engines.append(engine)
        models.append(ServedModel(policy or name, engine, describe_version(model)))
    return engines, models


def open_loader(
    model: "Model", args: argparse.Namespace, served: "LocalEngine", thread: ThreadPoolExecutor
) -> "AdapterLoader":
    """Return the loader of the served model's adapters. Those without a slot have engines of their
    own, together with as many rows as the model's."""
    from jaxtrain.generation.local.adapter_slots import AdapterSlots
    from jaxtrain.generation.local.engine import LocalEngine
    from jaxtrain.generation.serving.adapters import AdapterLoader

    count = args.max_loras or len(args.lora)
    rows = max(1, served.sampler.max_batch // count)
    # One more than adapters: one that is replaced keeps its slot until its answers have ended.
    slots = AdapterSlots(served.sampler, count + 1 if args.max_loras else count)

    def open_engine(weights: Any) -> LocalEngine:
        sampler = model.sampler(True, max_batch=rows, prefixes=args.prefix_cache)
        sampler.use(weights, 0)
        return LocalEngine(sampler, thread)

    snapshot = model.snapshot
    bundle, params = snapshot.roles.bundle, snapshot.params()
    return AdapterLoader(bundle, params, served, slots, open_engine)


def open_training(
    model: "Model",
    name: str,
    args: argparse.Namespace,
    served: "LocalEngine",
    thread: ThreadPoolExecutor,
) -> "TrainingApi":
    """Return the routes of --train over the served model; UserError for one that cannot be trained
    on."""
    from jaxtrain.generation.local.engine import LocalEngine
    from jaxtrain.training_api.routes import TrainingApi
    from jaxtrain.training_api.trainer import Base

    model.require_next_token()
    if args.draft or model.policies:
        cause = "--draft" if args.draft else "a run of several policies"
        raise UserError(f"serve: --train does not go with {cause}")
    base = Base(model.config, model.snapshot, model.max_len)
    sampler = model.sampler(True, max_batch=args.max_num_seqs)
    sampler.use(served.sampler.model, 0)
    # Clients read the tokenizer from the model's name, or from its folder on this machine.
    tokenizer = args.served_model_name or os.path.abspath(args.model)
    engine = LocalEngine(sampler, thread)
    return TrainingApi(args.train, name, base, engine, thread, tokenizer)


async def follow(model: "Model", models: "list[ServedModel]", engines: "list[LocalEngine]") -> None:
    """Replace the weights whenever a run has saved newer ones."""
    import jax

    from jaxtrain.generation.local.draft_model import renew_draft
    from jaxtrain.generation.local.speculation import DraftedModel

    while (Path(model.name) / "checkpoints").is_dir():
        await asyncio.sleep(POLL_SECONDS)
        try:
            if not await asyncio.to_thread(model.refresh):
                continue
        # The run may remove an old checkpoint while it is read; its next one will do.
        except (UserError, OSError) as error:
            log(f"a newer checkpoint cannot be read: {error}")
            continue
        step, version = model.snapshot.step, describe_version(model)
        snapshots = list(model.policies.values()) or [model.snapshot]
        for served, engine, snapshot in zip(models, engines, snapshots, strict=True):
            weights, old = split_layers(model, snapshot.model()), engine.sampler.model
            if isinstance(old, DraftedModel):
                with jax.set_mesh(model.mesh):
                    weights = DraftedModel(weights, renew_draft(old.draft, weights))
            served.replace(partial(engine.use, weights, step), version)
        log(f"{version}: served from the next request on")


def split_layers(model: "Model", weights: Any) -> Any:
    """Return a copy of a model whose layers lie apart: a chunk of one token would copy all of
    stacked ones first."""
    import jax

    from jaxtrain.generation.local.slots import unstack
    from jaxtrain.generation.local.speculation import DraftedModel

    if isinstance(weights, DraftedModel):
        return DraftedModel(split_layers(model, weights.target), weights.draft)
    with jax.set_mesh(model.mesh):
        return unstack(weights)


def describe_version(model: "Model") -> str:
    """Return the version of the weights, as answers name it."""
    return f"step-{model.snapshot.step}"


def log(text: str) -> None:
    """Print a line beside the answers."""
    print(text, file=sys.stderr, flush=True)
