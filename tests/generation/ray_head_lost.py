"""A trainer whose cluster loses its head, as a process of its own: Ray ends such a process soon
afterwards, whatever it does. Prints what ended the run."""

import os
import sys
import threading
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from jaxtrain.errors import RunStopped
    from jaxtrain.generation.ray import ray_cluster
    from jaxtrain.generation.ray.actors import start_service
    from jaxtrain.generation.ray.remote_producer import RemoteProducer, ServiceRequest
    from tests.generation.far_toy import OPENER, rules, settings
    from tests.generation.test_generation_ray import Nodes

    ray_cluster.GONE_SECONDS, ray_cluster.POLL_SECONDS = 2.0, 0.5
    nodes = Nodes(peers=0)
    nodes.config = nodes.config.model_copy(update={"worker_cpus": 1})
    try:
        asked = settings(worker={"holds": range(30)})
        service = start_service(nodes.join())
        producer = RemoteProducer(service, ServiceRequest("test", OPENER, asked), rules())
        head = nodes.cluster.head_node
        threading.Timer(1.0, lambda: head.kill_gcs_server(check_alive=False)).start()
        try:
            producer.next_slots(1)
        except RunStopped as stopped:
            print(f"stopped: {stopped}", flush=True)
    finally:
        nodes.end()
        print("ended", flush=True)
        os._exit(0)
