"""Have an interface send whole checksums in frames of the link's size, as a relay of raw frames needs it.

python checksums.py INTERFACE
"""

import array
import fcntl
import socket
import struct
import sys

_SIOCETHTOOL = 0x8946
# From linux/ethtool.h: checksums, scatter-gather, TCP segmentation and generic segmentation by the interface.
_OFFLOADS = (0x17, 0x19, 0x1F, 0x24)


def main(interface: str) -> None:
    """Switch the offloads of an interface off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in _OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control.fileno(), _SIOCETHTOOL, request)


if __name__ == "__main__":
    main(sys.argv[1])
