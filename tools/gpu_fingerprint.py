"""Prints the fingerprint of a GPU machine as JSON, and checks that it says what it should.

    python tools/gpu_fingerprint.py [--torch] [--cupy] [UUID …]

Without UUIDs it is that of every GPU, in the driver's order. `--torch` and `--cupy` import the library first,
as a stack would have, and use it, so that what it loads is loaded. Exit code 1 if a field that a GPU machine
must have is missing or unknown; they are named on stderr.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from worldmove.cuda.driver import devices
from worldmove.fingerprint import collect

MUST = ("gpu.count", "gpu.driver", "gpu.cuda", "gpu.0.name", "gpu.0.compute", "gpu.0.sms", "gpu.0.mig")
WITH_TORCH = (
    "torch",
    "torch.git",
    "torch.cuda",
    "torch.build",
    "torch.backends.cudnn.version",
    "cuda.cublas",
)
WITH_CUPY = ("package.cupy", "cuda.cublas")


def use(name: str) -> None:
    """Imports a library and multiplies two matrices on the first GPU with it."""
    library = importlib.import_module(name)
    if name == "torch":
        one = library.ones(64, 64, device="cuda:0", dtype=library.bfloat16)
    else:
        one = library.ones((64, 64), dtype=library.float32)
    _ = (one @ one).sum().item()


def main() -> int:
    """Prints the document; says what is missing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--cupy", action="store_true")
    parser.add_argument("uuids", nargs="*")
    options = parser.parse_args()
    must = list(MUST)
    if options.torch:
        use("torch")
        must += WITH_TORCH
    if options.cupy:
        use("cupy")
        must += WITH_CUPY
    uuids = options.uuids or [device.uuid for device in devices()]
    fields = collect(model="check", devices=uuids)
    print(json.dumps({"devices": uuids, "fields": fields}, indent=2, sort_keys=True))
    wrong = [name for name in must if fields.get(name, "unknown") in ("unknown", "None")]
    wrong += (
        ["torch imported without being asked for"] if "torch" in sys.modules and not options.torch else []
    )
    wrong += [f"{name} names a GPU" for name, value in fields.items() if any(u in value for u in uuids)]
    for each in wrong:
        print(each, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
