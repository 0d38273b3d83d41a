"""A node refuses GPUs on which one process's fault would be another's; the management library is imagined."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from gpu_kit import GPUS
from test_doctor_gpu import ONE, OTHER, facts

from worldmove.config import Settings
from worldmove.cuda import isolation
from worldmove.cuda.facts import GpuFacts, Slice
from worldmove.errors import ConfigError
from worldmove.node.devices import Devices

pytestmark = pytest.mark.usefixtures("imagined")


def known(**changes: object) -> GpuFacts:
    """Both imagined GPUs, the first one with these changes."""
    found = facts(**changes)
    gpus = [msgspec.structs.replace(gpu, uuid=uuid) for gpu, uuid in zip(found.gpus, GPUS, strict=True)]
    return msgspec.structs.replace(found, gpus=tuple(gpus))


def start(tmp_path: Path, gpus: str) -> Devices:
    settings = Settings(name="A", ledger="sqlite:///unused", run_dir=tmp_path, gpus=gpus, executors=1)
    return Devices(settings, lambda _event, _facts: None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"mps_clients": 3}, "3 clients"), ({"compute_mode": "exclusive-process"}, "exclusive-process")],
)
async def test_a_node_does_not_start_on_gpus_that_are_not_isolated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(isolation, "collect", lambda: known(**changes))
    with pytest.raises(ConfigError, match=words) as refused:
        await start(tmp_path, GPUS[0]).start()
    assert (refused.value.details["option"], refused.value.details["value"]) == ("gpus", GPUS[0])
    assert "--gpus none" in refused.value.message


async def test_the_mode_of_a_gpu_that_a_node_does_not_use_is_nothing_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "collect", lambda: known(compute_mode="prohibited"))
    devices = start(tmp_path, GPUS[1])
    await devices.start()
    await devices.close()


async def test_an_environment_that_asks_for_mps_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(isolation.MPS_PIPES, str(tmp_path))
    with pytest.raises(ConfigError, match="MPS is in use"):
        await start(tmp_path, GPUS[0]).start()


def test_a_slice_has_the_mode_of_its_gpu() -> None:
    part = Slice(uuid="MIG-1", name="1g", total_bytes=1)
    cut = facts(compute_mode="exclusive-process", mig=True, slices=(part,))
    assert isolation.modes(cut, {"MIG-1"}) == [f"{ONE}: compute mode exclusive-process"]
    assert isolation.modes(cut, {OTHER}) == []
    assert isolation.modes("NVML: none") == []
    assert isolation.mps("NVML: none", {}, {"bash"}) == ""
    assert isolation.mps("NVML: none", {}, {"nvidia-cuda-mps"})
