"""A lane: one process with one UCX worker, leased to one move at a time.

Started by `LanePool` as `python -m worldmove.transport.lane --fd N --parent PID`; with `--gpu UUID` it is a
*direct* lane of that GPU, else a `tcp` lane of host memory. It maps the lease's extents, and ends itself
on any failure: only the end of the process makes it certain that nothing writes any more. It never
outlives its node.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import signal
import socket
import sys

import uvloop

from worldmove import ipc
from worldmove.cuda.driver import find
from worldmove.errors import WorldMoveError
from worldmove.memory.near import stay_near
from worldmove.transport import ucx
from worldmove.transport.confine import use_device
from worldmove.transport.faults import Faults
from worldmove.transport.lane_messages import Command
from worldmove.transport.lane_process import LaneProcess
from worldmove.transport.sides import HostSide, Side
from worldmove.transport.ucx_transport import UcxTransport

PR_SET_PDEATHSIG = 1
ALERT_S = 0.05
"""For so long after the last thing that moved a direct lane looks without pause: from its connection until
the pause of a world that is not copied live, and from one message to the next."""


def _detach(parent: int) -> None:
    """Dies with its node, and takes no part in the terminal's signals."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0 or os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


async def _main(options: argparse.Namespace) -> int:
    channel: ipc.Channel[Command] = ipc.Channel(socket.socket(fileno=options.fd), Command)
    faults = Faults([name for name in options.faults.split(",") if name])
    if options.device:
        use_device(options.device)
    try:
        side, transport = _equipped(options)
        stall_s, opens = options.stall_ms / 1000, bool(options.gpu)
        lane = LaneProcess(channel, transport, side, stall_s, faults, device=options.device, opens=opens)
        await lane.run()
    except WorldMoveError as error:
        sys.stderr.write(f"lane {os.getpid()}: {error}\n")
        return 1
    return 0


def _equipped(options: argparse.Namespace) -> tuple[Side, UcxTransport]:
    """What a lane of its kind works with.

    Raises:
        WorldMoveError: UCX or the GPU can't be used.
    """
    if not options.gpu:
        return HostSide(inline=options.inline), UcxTransport()
    device = importlib.import_module("worldmove.transport.device_side")  # CuPy is only where it is needed
    stay_near(find(options.gpu).bus_id)
    # The GPU first: UCX works on the device that is current then.
    side: Side = device.DeviceSide(device.LaneGpu(options.gpu, options.slots))
    return side, UcxTransport(ucx.DEVICE_OPTIONS, ALERT_S)


def main(arguments: list[str] | None = None) -> None:
    """Entry of the process; does not return.

    UCX's orderly teardown could wait for a dead peer, and everything here dies with the process.
    """
    parser = argparse.ArgumentParser(prog="worldmove-lane")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--stall-ms", type=int, default=3000)
    parser.add_argument("--faults", default="")
    parser.add_argument("--device", default="")
    parser.add_argument("--inline", action="store_true")
    parser.add_argument("--gpu", default="")
    parser.add_argument("--slots", type=int, default=4)
    options = parser.parse_args(arguments)
    _detach(options.parent)
    code = uvloop.run(_main(options))
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
