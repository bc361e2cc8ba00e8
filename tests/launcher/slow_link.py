"""A slow and lossy link, for kernels without `tc netem`: frames go from one interface to another with a delay.

python slow_link.py FIRST SECOND DELAY_SECONDS LOSS SEED
"""

import heapq
import random
import select
import socket
import sys
import time

_ALL_PROTOCOLS = 3
_OUTGOING = 4


def main(first: str, second: str, delay_seconds: float, loss: float, seed: int) -> None:
    """Pass frames on in both directions until this process is killed."""
    chance = random.Random(seed)
    sockets = [_open(first), _open(second)]
    other = {sockets[0]: sockets[1], sockets[1]: sockets[0]}
    waiting: list[tuple[float, int, socket.socket, bytes]] = []
    count = 0
    print("ready", flush=True)
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 1.0
        for reader in select.select(sockets, [], [], pause)[0]:
            frame, place = reader.recvfrom(1 << 17)
            if place[2] == _OUTGOING or chance.random() < loss:
                continue
            count += 1
            heapq.heappush(waiting, (time.monotonic() + delay_seconds, count, other[reader], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, writer, frame = heapq.heappop(waiting)
            writer.send(frame)


def _open(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    opened.bind((interface, 0))
    return opened


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
