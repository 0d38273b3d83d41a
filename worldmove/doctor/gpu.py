"""Checks of GPUs: what is there, what was tried with it, what breaks isolation, what would be slow and why.

Each takes what was found out beforehand (`look`), so that tests can find out something else.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import msgspec

from worldmove.cuda.facts import FABRIC_STATES, Gpu, GpuFacts, Link, collect
from worldmove.cuda.isolation import MODE_ADVICE, MPS_ADVICE, modes, mps, processes
from worldmove.cuda.probe import driver_present
from worldmove.doctor.finding import Finding, fail, ok, warn
from worldmove.doctor.gpu_trial import DeviceTrial
from worldmove.doctor.ucx import ucx_transports

TRIAL_S = 180.0
LEAST_CAPABILITY = (8, 0)
WITHOUT = "or serve host memory alone: --gpus none"
SLOW_PEER_GBPS = 20.0
"""10⁹ bytes a second: less than PCIe 4 carries between two GPUs that reach each other."""

CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class Machine(NamedTuple):
    """What was found out about the GPUs of this machine.

    Attributes:
        facts: of the management library, or why there are none.
        trials: what was tried with each GPU, or why nothing could be.
        transports: of UCX.
        environment: of this process. processes: names of all that run. processors: that this one may use.
        nodes: processors by NUMA node.
    """

    facts: GpuFacts | str
    trials: tuple[DeviceTrial, ...] | str
    transports: frozenset[str]
    environment: Mapping[str, str]
    processes: frozenset[str]
    processors: frozenset[int]
    nodes: Mapping[int, frozenset[int]]

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """All that the library knows."""
        return () if isinstance(self.facts, str) else self.facts.gpus


GpuCheck = Callable[[Machine], Finding]


def look() -> Machine | None:
    """Finds out everything; `None` where there is no GPU's driver. Takes seconds where there is."""
    if not driver_present():
        return None
    return Machine(
        facts=collect(),
        trials=_try(),
        transports=frozenset(ucx_transports()),
        environment=dict(os.environ),
        processes=processes(),
        processors=frozenset(os.sched_getaffinity(0)),
        nodes=_nodes(Path("/sys/devices/system/node")),
    )


def devices(machine: Machine) -> Finding:
    """The GPUs and their MIG slices, by UUID."""
    name = "GPU"
    if isinstance(machine.facts, str):
        return warn(name, machine.facts, "Devices can't be described; the driver may not fit its library.")
    lines = [f"driver {machine.facts.driver}, CUDA {machine.facts.cuda}"]
    for gpu in machine.gpus:
        major, minor = gpu.capability
        lines.append(
            f"{gpu.uuid}: {gpu.name}, compute capability {major}.{minor}, {_gb(gpu.free_bytes)} of "
            f"{_gb(gpu.total_bytes)} GB free, PCIe {gpu.pci}{', MIG' if gpu.mig else ''}"
        )
        lines += [f"  {each.uuid}: {each.name}, {_gb(each.total_bytes)} GB" for each in gpu.slices]
    found = "\n".join(lines)
    if any(gpu.capability < LEAST_CAPABILITY for gpu in machine.gpus):
        return warn(name, found, "Kernels are tried from compute capability 8.0 on; name others by --gpus.")
    if any(gpu.mig and not gpu.slices for gpu in machine.gpus):
        return fail(name, found, "MIG without a slice leaves no device: nvidia-smi mig -cgi …, then -cci.")
    return ok(name, found)


def programs(_machine: Machine) -> Finding:
    """What a GPU's executor is made of: CuPy, which compiles kernels at its first start."""
    name = "GPU kernels"
    there = {
        str(dist.name).lower(): dist.version for each in CUPY for dist in metadata.distributions(name=each)
    }
    if not there:
        return fail(
            name, "CuPy is not installed", f"pip install 'worldmove[cu13]' (CUDA 12: cu12), {WITHOUT}"
        )
    if len(there) > 1:
        return fail(name, f"{' and '.join(sorted(there))}: they exclude each other", "Remove one.")
    return ok(name, ", ".join(f"{wheel} {version}" for wheel, version in there.items()))


def descriptors(machine: Machine) -> Finding:
    """Memory as descriptors: made, passed to a second process, and found there."""
    name = "GPU descriptors"
    advice = (
        f"Sessions can't lie on such a GPU: {WITHOUT}. In a container it has to be visible "
        "(--gpus, NVIDIA_VISIBLE_DEVICES), and in all containers that share a session's memory."
    )
    if isinstance(machine.trials, str):
        return fail(name, machine.trials, advice)
    wrong = [f"{each.uuid}: {each.descriptor or each.shared}" for each in machine.trials if _fails(each)]
    if wrong or not machine.trials:
        return fail(name, "\n".join(wrong) or "CUDA shows no device", advice)
    return ok(name, f"made, passed on and found by a second process on {len(machine.trials)} GPU(s)")


def links(machine: Machine) -> Finding:
    """Between GPUs: what the bus says, and what a copy of one's memory by the other came to."""
    name = "GPU links"
    known = (
        {} if isinstance(machine.facts, str) else {frozenset(link.ends): link for link in machine.facts.links}
    )
    lines, slow, broken = [], False, False
    for trial in () if isinstance(machine.trials, str) else machine.trials:
        for peer in trial.peers:
            link = known.get(frozenset((trial.uuid, peer.uuid)))
            way = _way(link) if link is not None else "unknown way"
            rate = peer.problem or f"{peer.gb_per_s or 0:.0f} GB/s"
            lines.append(f"{trial.uuid} ← {peer.uuid}: {way}, {rate}")
            broken = broken or bool(peer.problem)
            slow = slow or (peer.gb_per_s or 0) < SLOW_PEER_GBPS
    states = {gpu.fabric for gpu in machine.gpus if gpu.fabric in (1, 2)}
    if states:
        return fail(
            name,
            "\n".join([*lines, *(f"NVSwitch fabric: {FABRIC_STATES[state]}" for state in states)]),
            "Start the fabric manager (nvidia-fabricmanager) of the driver's own version.",
        )
    if broken:
        advice = (
            "Such a pair can't move a session by copy engines: moves between them go staged, over the host."
        )
        return warn(
            name, "\n".join(lines), advice + " A hypervisor or the IOMMU (ACS) may forbid peer access."
        )
    if slow and lines:
        return warn(name, "\n".join(lines), "Copies between these GPUs cross the host; NVLink is not in use.")
    return ok(name, "\n".join(lines) or "one device: nothing to link")


def isolation(machine: Machine) -> Finding:
    """Processes of their own contexts: what one does wrong must not end the others."""
    name = "GPU isolation"
    exclusive = modes(machine.facts)
    if served := mps(machine.facts, machine.environment, machine.processes):
        return fail(name, "; ".join([served, *exclusive]), f"{MPS_ADVICE}, {WITHOUT}.")
    if exclusive:
        return fail(name, "; ".join(exclusive), f"{MODE_ADVICE}, {WITHOUT}.")
    return ok(name, "no MPS, compute mode default")


def host_copies(machine: Machine) -> Finding:
    """Between GPU and host: pinned copies, which bound the staged path."""
    name = "GPU and host"
    trials = () if isinstance(machine.trials, str) else machine.trials
    lines = [
        f"{each.uuid}: {each.pinned or f'pinned copies at {each.pinned_gb_per_s or 0:.0f} GB/s'}"
        for each in trials
    ]
    advice = []
    if any(each.pinned for each in trials):
        advice.append(
            "Without pinned memory a GPU's executor can't start: look at memory limits and ulimit -l."
        )
    narrow = [gpu for gpu in machine.gpus if gpu.lanes and gpu.most_lanes and gpu.lanes < gpu.most_lanes]
    lines += [f"{gpu.uuid}: {gpu.lanes} of {gpu.most_lanes} PCIe lanes" for gpu in narrow]
    if narrow:
        advice.append("Staged moves of such a GPU are slower than it could be: look at its slot and riser.")
    if any(gpu.persistent is False for gpu in machine.gpus):
        lines.append("persistence is off")
        advice.append("The first use after a while takes seconds: nvidia-smi --persistence-mode=1.")
    found = "\n".join(lines) or "not tried"
    return warn(name, found, " ".join(advice)) if advice else ok(name, found)


def numa(machine: Machine) -> Finding:
    """The NUMA node of each GPU, on which its lanes and its staging ring belong."""
    name = "GPU NUMA"
    if len(machine.nodes) < 2:
        return ok(name, "one node")
    lines = [
        f"{gpu.uuid}: node {'unknown' if gpu.numa_node is None else gpu.numa_node}" for gpu in machine.gpus
    ]
    away = [
        gpu
        for gpu in machine.gpus
        if gpu.numa_node is not None
        and gpu.numa_node in machine.nodes
        and not machine.nodes[gpu.numa_node] & machine.processors
    ]
    if away:
        return warn(
            name,
            "\n".join(lines),
            "This process may not use a processor of a GPU's own node: staged moves cross sockets. "
            "Allow them (--cpuset-cpus, numactl, the service's CPUAffinity).",
        )
    return ok(name, "\n".join(lines))


def transports(machine: Machine) -> Finding:
    """What UCX can do with GPU memory; the direct path needs `cuda_copy` and `cuda_ipc`."""
    name = "GPU transports"
    there = sorted(each for each in machine.transports if each.startswith(("cuda", "gdr", "rc", "dc")))
    missing = [each for each in ("cuda_copy", "cuda_ipc") if each not in machine.transports]
    if missing:
        return warn(
            name,
            f"UCX has {', '.join(there) or 'none'}; missing: {', '.join(missing)}",
            "The direct path can't be used; moves go local or staged. UCX finds CUDA by libcuda.so.1: "
            "in a container it comes with the GPU (NVIDIA_DRIVER_CAPABILITIES=compute,utility).",
        )
    return ok(name, f"UCX has {', '.join(there)}")


def allocator(machine: Machine) -> Finding:
    """PyTorch's allocator: of some of its kinds of memory there is no handle."""
    name = "torch allocator"
    set_ = {key: machine.environment[key] for key in ALLOCATOR if machine.environment.get(key)}
    found = "; ".join(f"{key}={value}" for key, value in set_.items()) or "defaults"
    text = found.replace(" ", "").lower()
    if "expandable_segments:true" in text or "cudamallocasync" in text:
        return warn(
            name,
            found,
            "Memory of this kind has no CUDA IPC handle: a session can't be registered with source "
            "`cuda-ipc`. Place its tensors in arenas, or leave expandable_segments and cudaMallocAsync off.",
        )
    return ok(name, found)


GPU_CHECKS: tuple[GpuCheck, ...] = (
    devices,
    programs,
    descriptors,
    links,
    isolation,
    host_copies,
    numa,
    transports,
    allocator,
)


def _fails(trial: DeviceTrial) -> bool:
    return bool(trial.descriptor or trial.shared)


def _way(link: Link) -> str:
    way = f"{link.nvlinks} NVLinks" if link.nvlinks else f"PCIe ({link.topology})"
    return way if link.peer == "ok" else f"{way}, peer access: {link.peer}"


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f}"


def _try() -> tuple[DeviceTrial, ...] | str:
    command = [sys.executable, "-m", "worldmove.doctor.gpu_trial"]
    try:
        answer = subprocess.run(command, capture_output=True, timeout=TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return f"CUDA did not come through in {TRIAL_S:g} s"
    if answer.returncode:
        last = answer.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["it died without a word"]
        return last[0][:500]
    try:
        return msgspec.json.decode(answer.stdout, type=tuple[DeviceTrial, ...])
    except msgspec.DecodeError as error:
        return f"CUDA's trial gave no answer: {error}"


def _nodes(folder: Path) -> dict[int, frozenset[int]]:
    found = {}
    for path in folder.glob("node[0-9]*/cpulist"):
        found[int(path.parent.name.removeprefix("node"))] = frozenset(_numbers(path.read_text()))
    return found


def _numbers(text: str) -> list[int]:
    """`0-3,8` is 0, 1, 2, 3, 8."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
