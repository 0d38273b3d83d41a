"""The doctor on GPU hosts. CUDA is imagined (tests/fake_gpu), and so is the management library, here."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from worldmove.cuda.facts import Gpu, GpuFacts, Link, collect
from worldmove.doctor import GPU_CHECKS, Machine, examine, gpu
from worldmove.doctor.gpu_trial import DeviceTrial, PeerTrial, pattern

ONE, OTHER = "GPU-1", "GPU-2"


class NVMLError(Exception):
    pass


class FabricInfo(ctypes.Structure):
    _fields_ = [("state", ctypes.c_int)]


def refuse(*_: Any) -> Any:
    raise NVMLError("Not Supported")


def library(**changes: Any) -> Any:
    """What stands for pynvml: two GPUs in two slots, one cut into slices."""

    def fabric(_handle: int, info: Any) -> None:
        info._obj.state = 3

    return SimpleNamespace(
        **{
            "NVMLError": NVMLError,
            "NVML_NVLINK_MAX_LINKS": 18,
            "NVML_P2P_CAPS_INDEX_READ": 0,
            "c_nvmlGpuFabricInfo_v2_t": FabricInfo,
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: "580.1",
            "nvmlSystemGetCudaDriverVersion": lambda: 13000,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetMemoryInfo": lambda _handle: SimpleNamespace(total=8 << 30, free=7 << 30),
            "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:1{handle}:00.0"),
            "nvmlDeviceGetMigMode": lambda handle: (handle, handle),
            "nvmlDeviceGetMaxMigDeviceCount": lambda _handle: 2,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda _handle, index: 10 if index == 0 else refuse(),
            "nvmlDeviceGetComputeMode": lambda _handle: 0,
            "nvmlDeviceGetPersistenceMode": lambda _handle: 1,
            "nvmlDeviceGetMPSComputeRunningProcesses": refuse,
            "nvmlDeviceGetCudaComputeCapability": lambda _handle: (9, 0),
            "nvmlDeviceGetUUID": lambda handle: f"MIG-{handle}" if handle == 10 else f"GPU-{handle + 1}",
            "nvmlDeviceGetName": lambda _handle: b"Imagined",
            "nvmlDeviceGetCurrPcieLinkWidth": lambda _handle: 16,
            "nvmlDeviceGetMaxPcieLinkWidth": refuse,
            "nvmlDeviceGetGpuFabricInfoV": fabric,
            "nvmlDeviceGetP2PStatus": lambda *_: 0,
            "nvmlDeviceGetTopologyCommonAncestor": lambda *_: 50,
            "nvmlDeviceGetNvLinkState": lambda _handle, number: int(number < 4),
        }
        | changes
    )


def facts(**changes: Any) -> GpuFacts:
    gpus = tuple(
        Gpu(
            uuid=uuid,
            name="Imagined",
            capability=(9, 0),
            total_bytes=8 << 30,
            free_bytes=7 << 30,
            pci="0000:10:00.0",
            numa_node=number,
            persistent=True,
        )
        for number, uuid in enumerate((ONE, OTHER))
    )
    changed = (msgspec.structs.replace(gpus[0], **changes), gpus[1])
    link = Link(ends=(ONE, OTHER), nvlinks=18, peer="ok", topology="across sockets")
    return GpuFacts(driver="580.1", cuda="13.0", gpus=changed, links=(link,))


def trials(**changes: Any) -> tuple[DeviceTrial, ...]:
    well = [
        DeviceTrial(
            uuid=uuid,
            name="Imagined",
            pinned_gb_per_s=50.0,
            peers=(PeerTrial(uuid=other, gb_per_s=380.0),),
        )
        for uuid, other in ((ONE, OTHER), (OTHER, ONE))
    ]
    return (msgspec.structs.replace(well[0], **changes), well[1])


def machine(
    environment: Mapping[str, str] | None = None, processes: frozenset[str] = frozenset(), **changes: Any
) -> Machine:
    return Machine(
        facts=changes.get("facts", facts()),
        trials=changes.get("trials", trials()),
        transports=changes.get("transports", frozenset({"tcp", "cuda_copy", "cuda_ipc"})),
        environment=environment or {},
        processes=processes,
        processors=changes.get("processors", frozenset({0, 1})),
        nodes=changes.get("nodes", {0: frozenset({0}), 1: frozenset({1})}),
    )


def test_the_library_is_asked_for_everything(tmp_path: Path) -> None:
    node = tmp_path / "0000:10:00.0" / "numa_node"
    node.parent.mkdir()
    node.write_text("1\n")
    found = collect(library(), tmp_path)
    assert isinstance(found, GpuFacts)
    assert (found.driver, found.cuda) == ("580.1", "13.0")
    first, second = found.gpus
    assert (first.uuid, first.name, first.capability, first.pci) == (ONE, "Imagined", (9, 0), "0000:10:00.0")
    assert (first.numa_node, second.numa_node) == (1, None)
    assert (first.lanes, first.most_lanes, first.fabric, first.mps_clients) == (16, None, 3, 0)
    assert (first.slices, [each.uuid for each in second.slices]) == ((), ["MIG-10"])
    assert found.links == (Link(ends=(ONE, OTHER), nvlinks=4, peer="ok", topology="across sockets"),)


def test_a_library_that_refuses_is_reported_not_raised() -> None:
    assert collect(library(nvmlInit=refuse)) == "NVML: Not Supported"
    assert collect(library(nvmlDeviceGetCount=refuse)) == "NVML: Not Supported"


def test_this_machines_own_library_gives_facts_or_a_reason() -> None:
    found = collect()
    assert isinstance(found, GpuFacts) or "NVML" in found


def test_every_gpu_is_tried_in_processes_of_its_own(imagined: None) -> None:
    found = gpu._try()
    assert not isinstance(found, str)
    assert [each.name for each in found] == ["Imagined", "Imagined"]
    for each in found:
        assert (each.descriptor, each.shared, each.pinned) == ("", "", "")
        assert each.pinned_gb_per_s
        (peer,) = each.peers
        assert peer.uuid != each.uuid
        assert peer.gb_per_s
        assert not peer.problem


def test_without_a_driver_nothing_is_tried() -> None:
    if gpu.driver_present():
        pytest.skip("there is one")
    assert gpu.look() is None
    found = gpu._try()
    assert isinstance(found, str)
    assert "CUDA's driver cannot be used" in found


def test_the_pattern_is_the_same_in_every_process() -> None:
    assert (pattern() == pattern()).all()


@pytest.mark.parametrize("check", GPU_CHECKS, ids=lambda check: check.__name__)
def test_a_good_machine_is_well(check: gpu.GpuCheck) -> None:
    finding = check(machine())
    assert finding.found
    if check is not gpu.programs:
        assert finding.status == "ok", finding


BAD: dict[str, tuple[gpu.GpuCheck, Machine, str, str]] = {
    "no library": (gpu.devices, machine(facts="NVML: no"), "warn", "NVML"),
    "old": (gpu.devices, machine(facts=facts(capability=(7, 0))), "warn", "7.0"),
    "no slice": (gpu.devices, machine(facts=facts(mig=True)), "fail", "MIG"),
    "no CUDA": (gpu.descriptors, machine(trials="it hangs"), "fail", "it hangs"),
    "no device": (gpu.descriptors, machine(trials=()), "fail", "no device"),
    "no export": (gpu.descriptors, machine(trials=trials(descriptor="refused")), "fail", "refused"),
    "second": (gpu.descriptors, machine(trials=trials(shared="other bytes")), "fail", "other bytes"),
    "no peer": (
        gpu.links,
        machine(trials=trials(peers=(PeerTrial(uuid=OTHER, problem="not permitted"),))),
        "warn",
        "not permitted",
    ),
    "slow peer": (
        gpu.links,
        machine(trials=trials(peers=(PeerTrial(uuid=OTHER, gb_per_s=9.0),))),
        "warn",
        "9 GB/s",
    ),
    "fabric": (gpu.links, machine(facts=facts(fabric=2)), "fail", "under way"),
    "exclusive": (gpu.isolation, machine(facts=facts(compute_mode="exclusive-process")), "fail", "exclusive"),
    "MPS clients": (gpu.isolation, machine(facts=facts(mps_clients=2)), "fail", "2 clients"),
    "MPS server": (gpu.isolation, machine(processes=frozenset({"nvidia-cuda-mps"})), "fail", "MPS"),
    "MPS asked for": (gpu.isolation, machine({"CUDA_MPS_PIPE_DIRECTORY": "/x"}), "fail", "MPS"),
    "pinned": (gpu.host_copies, machine(trials=trials(pinned="refused")), "warn", "refused"),
    "narrow": (gpu.host_copies, machine(facts=facts(lanes=4, most_lanes=16)), "warn", "4 of 16"),
    "sleepy": (gpu.host_copies, machine(facts=facts(persistent=False)), "warn", "persistence"),
    "far": (gpu.numa, machine(processors=frozenset({0})), "warn", "node 1"),
    "no cuda_ipc": (gpu.transports, machine(transports=frozenset({"tcp", "cuda_copy"})), "warn", "cuda_ipc"),
    "segments": (
        gpu.allocator,
        machine({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: True"}),
        "warn",
        "expandable",
    ),
    "async": (
        gpu.allocator,
        machine({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
        "warn",
        "cudaMallocAsync",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named_with_advice(case: str) -> None:
    check, given, status, word = BAD[case]
    finding = check(given)
    assert (finding.status, word in finding.found) == (status, True), finding
    assert finding.advice


def test_a_report_has_the_gpus_checks_after_the_machines_own() -> None:
    report = examine([], machine())
    assert len(report.checks) == len(GPU_CHECKS)
    assert [finding.found for finding in examine([]).checks] == ["none: sessions live in host memory"]


def test_processor_lists_are_read_as_the_kernel_writes_them() -> None:
    assert gpu._numbers("0-3,8\n") == [0, 1, 2, 3, 8]
    assert gpu._numbers("\n") == []
