"""Training run over the machines of a Ray cluster, a process each:

    ray job submit --address http://HEAD:8265 --working-dir . -- \\
        python scripts/launch/ray_train.py --machines 2 --gpus 8 -- \\
        --config configs/sft_qwen3.toml run.output_dir=/shared/runs/a \\
        parallel.fsdp=-1 data.global_batch_size=64 optim.gradient_accumulation_steps=1

`ray job stop` has the run save and end; the same command goes on. jaxtrain must be installed on the
machines. (Rollouts on Ray are another thing: docs/cluster.md.)
"""

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from jaxtrain.distributed.child_processes import ServerProcess
from jaxtrain.distributed.hub import free_port
from jaxtrain.runs.dashboard.tail import Tail

SAVE_SECONDS = 600.0
"""What a run that is to stop may take."""


def read_arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(options, what stands behind --)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, required=True)
    parser.add_argument("--gpus", type=int, default=8, help="of each machine; 0: on CPUs")
    parser.add_argument("--cpus", type=int, default=1, help="of each machine, for Ray's books")
    cut = argv.index("--") if "--" in argv else len(argv)
    return parser.parse_args(argv[:cut]), argv[cut + 1 :]


def write_words(words: list[str], address: str, size: int, process: int) -> list[str]:
    """The command line of one process."""
    return [
        *words,
        f"parallel.coordinator={address}",
        f"parallel.num_processes={size}",
        f"parallel.process_id={process}",
    ]


class Host:
    """Actor that holds one machine's process, which ends with it."""

    def __init__(self):
        self.process: ServerProcess | None = None

    def find_address(self) -> str:
        """Return the address where process 0 will listen."""
        import ray

        return f"{ray.util.get_node_ip_address()}:{free_port()}"

    def run(self, words: list[str], token: str) -> int:
        """Run it to its end and print what it says; its exit code."""
        log = Path(tempfile.mkdtemp(prefix="jaxtrain-")) / "log.txt"
        command = [sys.executable, "-m", "jaxtrain.main", *words]
        self.process = ServerProcess(command, {**os.environ, "JAXTRAIN_TOKEN": token}, log, 0)
        self.process.start()
        tail, code = Tail(log), None
        while code is None:
            time.sleep(1.0)
            code = self.process.poll()
            for line in tail.read():
                print(line.decode(errors="replace"), flush=True)
        return code

    def stop(self) -> None:
        """Have it save and end."""
        if self.process is not None:
            self.process.stop(SAVE_SECONDS)


def main(argv: list[str]) -> int:
    """The worst exit code of all processes."""
    args, words = read_arguments(argv)
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init()
    share = {"CPU": args.cpus, **({"GPU": args.gpus} if args.gpus else {})}
    group = placement_group([share] * args.machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    host_class = ray.remote(Host)
    hosts = [
        host_class.options(
            num_cpus=args.cpus,
            num_gpus=args.gpus,
            max_concurrency=2,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote()
        for index in range(args.machines)
    ]
    address, token = ray.get(hosts[0].find_address.remote()), secrets.token_hex(32)
    addresses = []
    # Any of them stops all after the same step.
    signal.signal(signal.SIGTERM, lambda *_: addresses.append(hosts[0].stop.remote()))
    running = [
        host.run.remote(write_words(words, address, args.machines, index), token)
        for index, host in enumerate(hosts)
    ]
    return max(ray.get(running))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
