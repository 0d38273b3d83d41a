"""Whether PyTorch is there for a video world: asked before anything is started, so that it is one clear line.

    python -m worldmove.demo.video.ready

says what keeps PyTorch from the GPUs, or nothing: in a process of its own, since the demo itself holds no
CUDA.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from worldmove.cuda.probe import ask
from worldmove.errors import ConfigError, DeviceError

MISSING = "the video world needs PyTorch: pip install 'worldmove[torch]', or the stack's own build"


async def check(*, gpu: bool) -> None:
    """Checks that actors could play, on GPUs if `gpu` says so.

    Raises:
        ConfigError: PyTorch is not installed, or can't use a GPU; how to get it stands in the message.
    """
    option = "gpu" if gpu else "video"
    if find_spec("torch") is None:
        raise ConfigError(MISSING, option=option)
    if gpu and (why := await _asked()):
        raise ConfigError(why, option=option)


async def _asked() -> str:
    try:
        return (await ask("worldmove.demo.video.ready")).decode().strip()
    except DeviceError as error:
        return f"PyTorch can't be loaded: {error.message}"


def reason() -> str:
    """What keeps PyTorch from using a GPU; empty: nothing."""
    import torch  # noqa: PLC0415 - only the process that asks loads it

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None:
        return (
            f"PyTorch {torch.__version__} computes on the CPU only; on GPUs the video world needs a build "
            "for CUDA: pip install --force-reinstall torch, or as pytorch.org says for this driver"
        )
    return (
        f"PyTorch {torch.__version__} sees no GPU: its CUDA {torch.version.cuda} may be newer than the "
        "driver; pytorch.org has builds for others"
    )


if __name__ == "__main__":
    sys.stdout.write(reason())
