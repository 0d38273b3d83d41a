"""The targets of tools/fuzz under hypothesis: no bytes of another process or node do harm."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_kit import open_descriptors
from structure_kit import ROOT

EXAMPLES = 250
NAMES = ("bodies", "lane", "packets", "peer")


@pytest.fixture(scope="module")
def fuzz() -> Any:
    """Modules `seeds` and `targets` of tools/fuzz."""
    folder = str(ROOT / "tools" / "fuzz")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("seeds"), importlib.import_module("targets")
    finally:
        sys.path.remove(folder)


def test_every_target_is_run_here(fuzz: Any) -> None:
    seeds, targets = fuzz
    assert sorted(targets.TARGETS) == sorted(seeds.MAKERS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_good_inputs_pass(name: str, fuzz: Any) -> None:
    seeds, targets = fuzz
    assert seeds.seeds(name)
    for seed in seeds.seeds(name):
        targets.TARGETS[name](seed)


@pytest.mark.parametrize("name", NAMES)
def test_no_input_is_a_finding(name: str, fuzz: Any) -> None:
    seeds, targets = fuzz
    before = open_descriptors()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(seeds.inputs(name))
    def run(data: bytes) -> None:
        targets.TARGETS[name](data)

    run()
    assert open_descriptors() <= before


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(choice=st.integers(0, 255), length=st.integers(0, 70))
def test_a_spilled_body_of_any_descriptor(choice: int, length: int, fuzz: Any) -> None:
    """Pipes, directories and memory of another length than announced."""
    _, targets = fuzz
    ipc = targets.ipc
    targets.TARGETS["packets"](bytes([choice]) + ipc.HEADER.pack(ipc.MAGIC, ipc.SPILLED, length))


def test_a_spilled_body_must_be_memory(tmp_path: Path, fuzz: Any) -> None:
    _, targets = fuzz
    ipc = targets.ipc
    file = tmp_path / "file"
    file.write_bytes(b"\x81\xa4type\xa5ready")
    decoder = targets.msgspec.msgpack.Decoder(targets.WorkerMessage)
    packet = ipc.HEADER.pack(ipc.MAGIC, ipc.SPILLED, 12)
    for path in (file, tmp_path):
        if path == tmp_path or os.statvfs(path).f_fsid != os.statvfs("/dev/shm").f_fsid:
            fd = os.open(path, os.O_RDONLY)
            with pytest.raises(targets.FramingError):
                ipc.unpack(packet, [fd], 0, decoder)
            with pytest.raises(OSError, match="descriptor"):
                os.fstat(fd)
