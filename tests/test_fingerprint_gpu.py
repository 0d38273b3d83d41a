"""The GPU's part of the fingerprint, from what driver, libraries and PyTorch say: stand-ins here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from worldmove import fingerprint
from worldmove.errors import DeviceError, ValidationError
from worldmove.fingerprint import gpu
from worldmove.fingerprint.libraries import library_fields, library_version, loaded, package_fields
from worldmove.fingerprint.torch_fields import torch_fields

H200 = gpu.Gpu("NVIDIA H200", "9.0", 132, "none")
SLICE = gpu.Gpu("NVIDIA H200", "9.0", 16, "1g.18gb")
ONE, TWO = "GPU-00000000-0000-0000-0000-000000000001", "MIG-00000000-0000-0000-0000-000000000002"


def hardware(**more: Any) -> gpu.Hardware:
    return gpu.Hardware(**{"gpus": {ONE: H200, TWO: SLICE}, "driver": "580.95.05", "cuda": "13.0", **more})


def test_fields_are_numbered_in_the_worlds_order_and_name_no_gpu() -> None:
    fields = gpu.gpu_fields([TWO, ONE], hardware)
    assert {name: value for name, value in fields.items() if not name.startswith("env.")} == {
        "gpu.count": "2",
        "gpu.driver": "580.95.05",
        "gpu.cuda": "13.0",
        "gpu.0.name": "NVIDIA H200",
        "gpu.0.compute": "9.0",
        "gpu.0.sms": "16",
        "gpu.0.mig": "1g.18gb",
        "gpu.1.name": "NVIDIA H200",
        "gpu.1.compute": "9.0",
        "gpu.1.sms": "132",
        "gpu.1.mig": "none",
    }


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (hardware(driver="580.95.06"), ["gpu.driver"]),
        (hardware(cuda="12.9"), ["gpu.cuda"]),
        (hardware(gpus={ONE: H200._replace(sms=114)}), ["gpu.0.sms"]),
        (
            hardware(gpus={ONE: H200._replace(name="NVIDIA H100", compute="8.9")}),
            ["gpu.0.compute", "gpu.0.name"],
        ),
        (hardware(gpus={ONE: H200._replace(mig="7g.141gb")}), ["gpu.0.mig"]),
        (hardware(gpus={ONE: H200, TWO: H200}), []),
    ],
)
def test_one_difference_is_one_field(other: gpu.Hardware, names: list[str]) -> None:
    mine, theirs = gpu.gpu_fields([ONE], hardware), gpu.gpu_fields([ONE], lambda: other)
    assert fingerprint.differences(mine, theirs) == names


def test_a_gpu_that_is_hidden_from_this_process_says_so() -> None:
    fields = gpu.gpu_fields([ONE, TWO], lambda: hardware(gpus={ONE: H200}))
    assert fields["gpu.1.name"] == gpu.UNSEEN
    assert "gpu.1.sms" not in fields


def test_variables_that_choose_kernels_count_where_they_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert "env.CUBLAS_WORKSPACE_CONFIG" not in gpu.gpu_fields([ONE], hardware)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert gpu.gpu_fields([ONE], hardware)["env.CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Driver:
    """The driver's bindings as far as they are asked, of two devices, one of them a slice."""

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
    )
    names = (b"NVIDIA H200\0\0", b"NVIDIA H200 MIG 1g.18gb\0")

    def cuInit(self, flags: int) -> tuple[int]:  # noqa: N802
        return (0,)

    def cuDeviceGetCount(self) -> tuple[int, int]:  # noqa: N802
        return 0, 2

    def cuDeviceGet(self, ordinal: int) -> tuple[int, int]:  # noqa: N802
        return 0, ordinal

    def cuDeviceGetName(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, self.names[device]

    def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:  # noqa: N802
        return 0, SimpleNamespace(bytes=bytes([*[0] * 15, device + 1]))

    def cuDeviceGetPCIBusId(self, size: int, device: int) -> tuple[int, bytes]:  # noqa: N802
        return 0, f"0000:{device:02x}:00.0\0".encode()[:size]

    def cuDeviceTotalMem(self, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, 1 << 37

    def cuDeviceGetAttribute(self, kind: int, device: int) -> tuple[int, int]:  # noqa: N802
        return 0, {75: 9, 76: 0, 16: (132, 16)[device]}[kind]

    def cuDriverGetVersion(self) -> tuple[int, int]:  # noqa: N802
        return 0, 13020


def imagine(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    package = SimpleNamespace(__path__=[])
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, package)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)  # type: ignore[arg-type]


def test_the_driver_is_asked_without_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    imagine(monkeypatch, Driver())
    found = gpu.read_hardware()
    assert found.gpus == {ONE: H200, TWO: SLICE}
    assert found.cuda == "13.2"


def test_a_slice_has_its_own_uuid_where_bindings_have_two_functions_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Twelve(Driver):
        """Of CUDA 12: the plain function gives a slice its GPU's UUID."""

        def cuDeviceGetUuid(self, device: int) -> tuple[int, Any]:  # noqa: N802
            return 0, SimpleNamespace(bytes=bytes([*[0] * 15, 9 * (device + 1)]))

        def cuDeviceGetUuid_v2(self, device: int) -> tuple[int, Any]:  # noqa: N802
            return super().cuDeviceGetUuid(device)

    imagine(monkeypatch, Twelve())
    assert gpu.read_hardware().gpus == {ONE: H200, TWO: SLICE}


def test_where_the_drivers_version_comes_from(tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    class NVMLError(Exception):
        pass

    def refuse() -> None:
        raise NVMLError

    file = tmp_path / "version"
    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.95.05",
    )
    assert gpu.driver_version(lambda name: nvml, file) == "580.95.05"
    assert gpu.driver_version(missing, file) == "unknown"
    nvml.nvmlInit = refuse
    assert gpu.driver_version(lambda name: nvml, file) == "unknown"
    file.write_text("575.1\n")
    assert gpu.driver_version(missing, file) == "575.1"


MAPS = """\
7f00-7f01 r-xp 00000000 08:01 1 /opt/v/nvidia/cu13/lib/libcublas.so.13
7f01-7f02 r--p 00000000 08:01 1 /opt/v/nvidia/cu13/lib/libcublas.so.13
7f02-7f03 r-xp 00000000 08:01 2 /opt/v/nvidia/cu13/lib/libcublasLt.so.13
7f03-7f04 r-xp 00000000 08:01 3 /opt/my libs/libcudnn.so.9
7f04-7f05 r-xp 00000000 08:01 4 /opt/v/libcudnn_ops.so.9
7f05-7f06 rw-p 00000000 00:00 0 [heap]
7f06-7f07 r-xp 00000000 08:01 5 /usr/lib/libc.so.6
7f07-7f08 rw-p 00000000 00:00 0
"""


def test_libraries_are_those_that_are_mapped() -> None:
    found = loaded(MAPS)
    assert found == {
        "cublas": "/opt/v/nvidia/cu13/lib/libcublas.so.13",
        "cublasLt": "/opt/v/nvidia/cu13/lib/libcublasLt.so.13",
        "cudnn": "/opt/my libs/libcudnn.so.9",
    }
    fields = library_fields(MAPS, lambda name, path: f"{name}!")
    assert (fields["cuda.cublas"], fields["cuda.cudnn"]) == ("cublas!", "cudnn!")
    assert library_version("cublas", "/nowhere/libcublas.so") == "unknown"


def test_a_library_is_asked_itself(tmp_path: Path) -> None:
    source, library = tmp_path / "lib.c", tmp_path / "libcublas.so.13"
    source.write_text(
        "int cublasGetProperty(int kind, int *value) { *value = 13 - kind; return 0; }\n"
        "unsigned long cudnnGetVersion(void) { return 91300; }\n"
        "int nvrtcVersion(int *major, int *minor) { *major = 13; *minor = 1; return 0; }\n"
        "int ncclGetVersion(int *version) { *version = 22803; return 0; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    asked = {name: library_version(name, str(library)) for name in ("cublas", "cudnn", "nvrtc", "nccl")}
    assert asked == {"cublas": "13.12.11", "cudnn": "91300", "nvrtc": "13.1", "nccl": "22803"}
    assert library_version("cublasLt", str(library)) == "unknown"


def test_packages_count_once_they_are_imported() -> None:
    modules = {"triton": SimpleNamespace(__version__="3.5.0"), "xformers": object(), "numpy": object()}
    assert package_fields(modules) == {"package.triton": "3.5.0", "package.xformers": "unknown"}


def stand_in(**more: Any) -> Any:
    def refuse() -> None:
        raise RuntimeError("mix of the legacy and new APIs")

    base = {
        "__version__": "2.13.0",
        "version": SimpleNamespace(git_version="abc", cuda="13.0"),
        "__config__": SimpleNamespace(show=lambda: "built"),
        "get_float32_matmul_precision": lambda: "high",
        "are_deterministic_algorithms_enabled": lambda: True,
        "backends": SimpleNamespace(
            cudnn=SimpleNamespace(version=lambda: 91300, benchmark=False, allow_tf32=True),
            cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=refuse), flash_sdp_enabled=lambda: True),
        ),
    }
    return SimpleNamespace(**{**base, **more})


def test_torchs_build_and_flags() -> None:
    fields = torch_fields(stand_in())
    assert fields["torch"] == "2.13.0"
    assert (fields["torch.git"], fields["torch.cuda"]) == ("abc", "13.0")
    assert fields["torch.float32_matmul_precision"] == "high"
    assert fields["torch.backends.cudnn.version"] == "91300"
    assert fields["torch.backends.cuda.matmul.allow_tf32"] == "mixed"
    assert "torch.backends.mkldnn.enabled" not in fields
    other = torch_fields(stand_in(get_float32_matmul_precision=lambda: "highest"))
    assert fingerprint.differences(fields, other) == ["torch.float32_matmul_precision"]
    assert torch_fields(SimpleNamespace()) == {}


def test_torch_is_never_imported_for_it() -> None:
    program = (
        "import json, sys; from worldmove.fingerprint import collect; fields = collect(model='m');"
        "print(json.dumps(['torch' in sys.modules, [f for f in fields if f.startswith(('torch', 'gpu'))]]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=True)
    assert json.loads(done.stdout) == [False, []]


def test_real_torch_says_its_flags() -> None:
    pytest.importorskip("torch", reason="torch is not installed: pip install worldmove[torch]")
    program = (
        "import json, torch; from worldmove.fingerprint import collect; one = collect(model='m');"
        "torch.use_deterministic_algorithms(True); torch.set_float32_matmul_precision('high');"
        "print(json.dumps([one, collect(model='m')]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, check=True)
    one, two = json.loads(done.stdout)
    assert {"torch.float32_matmul_precision", "torch.are_deterministic_algorithms_enabled"} <= set(
        fingerprint.differences(one, two)
    )


def test_a_world_on_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> gpu.Hardware:
        raise DeviceError("CUDA's driver cannot be used")

    with pytest.raises(DeviceError):
        gpu.gpu_fields([ONE], nobody)


def test_what_the_stack_says() -> None:
    fields = fingerprint.stack_fields(
        attention="flash-attn 2.8", resolution=(480, 832), batch=1, tensor_parallel=2, quantisation="none"
    )
    assert fields == {
        "stack.attention": "flash-attn 2.8",
        "stack.resolution": "480x832",
        "stack.batch": "1",
        "stack.tensor_parallel": "2",
        "stack.quantisation": "none",
    }
    assert fingerprint.collect(fields, model="m")["stack.batch"] == "1"
    with pytest.raises(ValidationError, match="batch is 0"):
        fingerprint.stack_fields(batch=0)
