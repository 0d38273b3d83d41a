"""What breaks the isolation of processes on a GPU: MPS, and compute modes that let only one of them in.

Worker, executor and lanes have a context each on one GPU, and what one does wrong must not end the others.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from worldmove.cuda.facts import GpuFacts, collect

MPS_CONTROL = "nvidia-cuda-mps"
"""How the names of MPS's processes begin."""
MPS_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
MPS_ADVICE = (
    "Under MPS one process's fault ends the contexts of all: a node's executor could kill a world. "
    f"Stop it (echo quit | nvidia-cuda-mps-control), unset {MPS_PIPES}"
)
MODE_ADVICE = "Worker, executor and lanes each have a context on the GPU: nvidia-smi --compute-mode=DEFAULT"


def mps(facts: GpuFacts | str, environment: Mapping[str, str], processes: Collection[str]) -> str:
    """That MPS is in use, or would be by a process with this environment; empty where it is not.

    Args:
        facts: of the management library, or why there are none.
        environment: of this process.
        processes: names of all that run.
    """
    clients = 0 if isinstance(facts, str) else sum(gpu.mps_clients for gpu in facts.gpus)
    served = clients or any(each.startswith(MPS_CONTROL) for each in processes)
    return f"MPS is in use ({clients} clients)" if served or MPS_PIPES in environment else ""


def modes(facts: GpuFacts | str, uuids: Collection[str] | None = None) -> list[str]:
    """GPUs whose compute mode does not let several processes in; of all, or of those with these UUIDs.

    A MIG slice has the mode of the GPU that it is cut from.
    """
    if isinstance(facts, str):
        return []
    return [
        f"{gpu.uuid}: compute mode {gpu.compute_mode}"
        for gpu in facts.gpus
        if gpu.compute_mode != "default"
        and (uuids is None or {gpu.uuid, *(each.uuid for each in gpu.slices)} & set(uuids))
    ]


def broken(uuids: Collection[str]) -> str:
    """Why this machine's GPUs of these UUIDs can't be shared, and what helps; empty where they can."""
    facts = collect()
    if found := mps(facts, os.environ, processes()):
        return f"{found}. {MPS_ADVICE}"
    exclusive = modes(facts, uuids)
    return f"{'; '.join(exclusive)}. {MODE_ADVICE}" if exclusive else ""


def processes() -> frozenset[str]:
    """The names of all processes that this one can see."""
    names = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            names.add(path.read_text().strip())
        except OSError:
            continue
    return frozenset(names)
