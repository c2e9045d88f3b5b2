"""The verbs `serve-rollouts` and `stop-rollouts`: a rollout service that outlives its runs.

Service and servers are Ray actors with names; runs find them by rollout.service ray://NAME. Between
two runs the servers keep the weights of the last one, and the service nothing.
"""

from contextlib import closing

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.config import load_config
from jaxtrain.config.ray import DEFAULT_NAME, SCHEME, RayConfig, service_name
from jaxtrain.errors import UserError
from jaxtrain.generation.ray.actors import start_service
from jaxtrain.generation.ray.hosts import describe_hosts, find_hosts, launch, stop_hosts
from jaxtrain.generation.ray.ray_cluster import join
from jaxtrain.generation.ray.remote import RemoteLost, read

STOP_SECONDS = 20.0


def serve_rollouts(argv: list[str]) -> None:
    """Start what the config names, wait until the service answers, and leave it behind."""
    parser = Parser("jaxtrain serve-rollouts", description=serve_rollouts.__doc__)
    parser.add_argument("--config", type=expand_path, required=True, help="TOML or YAML file")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_intermixed_args(argv)
    config = load_config(args.config, args.overrides)
    rollout = config.rollout
    name = service_name(rollout.service)
    if name is None:
        raise UserError(
            f"serve-rollouts: rollout.service {rollout.service!r} has no name; give it one:"
            f" rollout.service={SCHEME}{DEFAULT_NAME}"
        )
    if rollout.ray.address is None:
        raise UserError(
            "serve-rollouts: a Ray of this machine alone would end with this command; start a"
            " cluster (ray start --head) and set rollout.ray.address=auto"
        )
    cluster = join(rollout.ray)
    if cluster.has(name):
        raise UserError(
            f"serve-rollouts: there is a service {name} already; jaxtrain stop-rollouts {name} ends"
            " it, or choose another name"
        )
    # First the servers: they make the key that the service's workers need.
    hosts = []
    if rollout.vllm.launch == "ray":
        hosts = launch(cluster, config, None, name)
    service = start_service(cluster, name)
    try:
        read(service.call("status").result(rollout.ray.wait_seconds))
    except (TimeoutError, RemoteLost) as error:
        raise UserError(
            f"serve-rollouts: the cluster had no room for the service within"
            f" {rollout.ray.wait_seconds:g} s (rollout.ray.wait_seconds): {error}; see ray status"
        ) from None
    for line in describe_hosts(hosts):
        print(line)
    print(f"service {name} is there, {cluster.describe()}")
    print(
        f"a run uses it with rollout.service={SCHEME}{name}; jaxtrain stop-rollouts {name} ends it"
    )
    cluster.close()


def stop_rollouts(argv: list[str]) -> None:
    """End a service, its workers and its servers."""
    parser = Parser("jaxtrain stop-rollouts", description=stop_rollouts.__doc__)
    parser.add_argument("name", help="as in rollout.service=ray://NAME")
    parser.add_argument("--address", default="auto", help="of the cluster (default: auto)")
    namespace = RayConfig().namespace
    parser.add_argument("--namespace", default=namespace, help=f"default: {namespace}")
    args = parser.parse_args(argv)
    name = args.name.removeprefix(SCHEME)
    with closing(join(RayConfig(address=args.address, namespace=args.namespace))) as cluster:
        service = cluster.find(name)
        held = read(service.call("status").result(STOP_SECONDS))
        if held.get("left", 0) > 0:
            print(f"warning: it served {held['who']}")
        hosts = find_hosts(cluster, name)
        stop_hosts(hosts)
        service.kill()
        print(f"service {name} has ended, and {len(hosts)} servers")
