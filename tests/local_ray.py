"""A Ray cluster of two nodes on the loopback, in a process of its own: `python local_ray.py DASHBOARD_PORT FOLDER`.

A line on its standard input loses the second node and adds another one; the end of the input stops the cluster.
"""

import sys
from pathlib import Path

from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

ADDRESS = "127.0.0.1"
SMALL = {"num_cpus": 2, "num_gpus": 2, "object_store_memory": 80_000_000, "node_ip_address": ADDRESS}


def main(port: int, folder: str) -> None:
    """Run the cluster until the standard input ends."""
    head = {
        **SMALL,
        "include_dashboard": True,
        "dashboard_host": ADDRESS,
        "dashboard_port": port,
        "temp_dir": folder,
    }
    # Ray writes its address there too, and does not create the folder where it is told another one for all else.
    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(initialize_head=True, head_node_args=head)
    node = cluster.add_node(**SMALL)
    print("ready", flush=True)
    for _ in sys.stdin:
        cluster.remove_node(node, allow_graceful=False)
        node = cluster.add_node(**SMALL)
        print("replaced", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
