"""Section env.gym: NeMo Gym servers as the world."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field

from jaxtrain.config.base import RESUMABLE, Place, Section, is_set, requires, unread
from jaxtrain.config.limits import ITEMS, SECONDS


class GymConfig(Section):
    """NeMo Gym (0.7): rows are its JSON lines, each the body of a POST /run."""

    head: Annotated[str | None, RESUMABLE] = None
    """URL of a Gym's head server that runs, such as "http://127.0.0.1:11000". Agents in it ask for
    their answers where its policy_base_url points: that has to be this run, see host, port and
    api_key."""
    servers: dict[str, str] = {}
    """URLs of single servers that run, by their names: {calc_agent = "http://127.0.0.1:10151"};
    agents, for mode verify resources servers. Without a head server, or for those it does not list.
    """
    token: str | None = None
    """head, servers: what a proxy in front of that Gym wants as Authorization: Bearer (Gym itself
    wants none); "$NAME" is that environment variable."""
    start: Annotated[bool, RESUMABLE] = False
    """Instead of head and servers: start those of `configs` with the run, and end them with it."""
    python: Annotated[Place | None, RESUMABLE] = None
    """start: the interpreter of the environment in which nemo-gym is installed."""
    configs: list[Place] = []
    """start: Gym's own config files, of its package (resources_servers/NAME/configs/NAME.yaml) or
    below `directory`. The one of the policy's model server is added. Empty: all of `directory`."""
    directory: Annotated[Place, RESUMABLE] = "."
    """start: where `resources_servers/NAME/app.py` and `responses_api_agents/NAME/app.py` of your
    own lie, each with `configs/NAME.yaml`."""
    overrides: dict[str, Any] = {}
    """start: further keys of Gym's config, such as {jx_calc_agent = {responses_api_agents =
    {simple_agent = {max_steps = 3}}}}."""
    own_environments: Annotated[bool, RESUMABLE] = False
    """start: let Gym build a virtual environment for each server with uv, as their requirements
    say. False: all of them run in that of `python`."""
    start_seconds: Annotated[float, RESUMABLE] = Field(600.0, gt=0, le=SECONDS)
    """Longest wait until all servers are up: at the start, and after they were lost."""
    agent: str | None = None
    """Which agent plays, by its name in Gym's config; unset: the row's agent_ref. Several agents by
    weights: a dataset each in data.datasets, with its own env."""
    mode: Literal["agent", "verify"] = "agent"
    """agent: its loop of answers and tools plays (POST /run). verify: one answer of the policy,
    judged by the agent's resources server (POST /verify), which is cheaper."""
    concurrency: Annotated[int, RESUMABLE] = Field(256, ge=1, le=ITEMS)
    """Most episodes that play at once; the others wait. Gym's servers want a limit of open files
    (ulimit -n) of several times as many."""
    rewards: dict[str, float] = {}
    """Which numbers of Gym's verdict are rewards, with their factors: `reward`, those of its
    reward_components, and any other number by its name. Empty: reward alone."""
    drop_nulls: bool = False
    """Leave out keys that are null below responses_create_params: of rows from parquet files and
    the Hub, whose readers add them where some rows have a key and others not."""
    host: Annotated[str, RESUMABLE] = "127.0.0.1"
    """Where the run listens for agents that ask for answers."""
    port: Annotated[int, RESUMABLE] = Field(0, ge=0, le=65535)
    """0: any free port. A Gym that runs has to know it: policy_base_url http://HOST:PORT/v1."""
    api_key: Annotated[str | None, RESUMABLE] = None
    """What agents have to send, Gym's policy_api_key: "$NAME" is that environment variable. Unset:
    a random one."""


def find_gym_conflicts(gym: GymConfig, kind: str) -> Iterator[str]:
    """Yield one sentence for each impossible combination with env.kind."""
    if kind != "nemo_gym":
        return
    config = SimpleNamespace(env=SimpleNamespace(gym=gym))
    if gym.start == bool(gym.head or gym.servers):
        yield (
            "env.kind nemo_gym needs either env.gym.head (the URL of a Gym that runs), or"
            " env.gym.servers (those of its agents), or env.gym.start with env.gym.python and"
            " env.gym.configs"
        )
        return
    for key, url in [("head", gym.head), *((f"servers.{n}", u) for n, u in gym.servers.items())]:
        if url is not None and not url.startswith(("http://", "https://")):
            yield f"env.gym.{key} must be a URL such as http://127.0.0.1:11000, not {url!r}"
    if gym.start:
        yield from requires("env.gym.start", "env.gym.python")(config)
        if not gym.configs and not is_set(config, "env.gym.directory"):
            yield "env.gym.start needs env.gym.configs, or env.gym.directory with servers of yours"
        if gym.token is not None:
            yield "env.gym.token goes with env.gym.head or servers, not with start; remove it"
        return
    keys = ("python", "configs", "directory", "overrides", "own_environments")
    yield from unread(" ".join(f"env.gym.{key}" for key in keys), "env.gym.start", bool)(config)
    if gym.mode == "agent" and not (gym.port and gym.api_key):
        yield (
            "a Gym that runs (env.gym.head, servers) needs env.gym.port and env.gym.api_key in mode"
            " agent: those of its policy_base_url (http://HOST:PORT/v1) and policy_api_key"
        )
