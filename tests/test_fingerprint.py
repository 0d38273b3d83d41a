"""What two hosts must share, and how a difference is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from worldmove.errors import ValidationError
from worldmove.fingerprint import MAX_FIELDS, MAX_LENGTH, check, collect, cpu_fields, differences

X86 = "processor : 0\nvendor_id : GenuineIntel\nmodel name : Xeon\nflags : sse avx fma\n\nprocessor : 1\n"
ARM = "processor : 0\nBogoMIPS : 50\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU part : 0xd40\n"


def in_a_process(**environment: str) -> dict[str, str]:
    program = "import json; from worldmove.fingerprint import collect; print(json.dumps(collect(model='m')))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=os.environ | environment,
        capture_output=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_says_what_decides_the_bits() -> None:
    fields = collect({"attention": "numpy"}, model="world-1", weights_digest="abc")
    for name in (
        "machine",
        "libc",
        "python",
        "numpy",
        "numpy.simd",
        "numpy.blas",
        "cpu",
        "cpu.flags",
        "library.0",
    ):
        assert fields[name]
    assert (fields["model"], fields["weights"], fields["attention"]) == ("world-1", "abc", "numpy")


def test_is_equal_in_another_process_of_the_host() -> None:
    assert differences(in_a_process(), in_a_process()) == []


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        ({"OPENBLAS_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Haswell"}, "env.OPENBLAS_CORETYPE"),
        ({"NPY_DISABLE_CPU_FEATURES": "AVX512_ICL"}, "env.NPY_DISABLE_CPU_FEATURES"),
    ],
)
def test_a_variable_that_changes_the_code_path_differs(environment: dict[str, str], field: str) -> None:
    assert field in differences(in_a_process(OPENBLAS_NUM_THREADS="1"), in_a_process(**environment))


def test_threads_of_blas_count() -> None:
    one, two = in_a_process(OPENBLAS_NUM_THREADS="1"), in_a_process(OPENBLAS_NUM_THREADS="2")
    assert all(name.startswith("library.") for name in differences(one, two))
    if os.cpu_count() != 1:
        assert differences(one, two)


def test_differences_name_both_sides() -> None:
    assert differences({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "x", "d": "4"}) == ["b", "c", "d"]
    assert differences({}, {}) == []


def test_processor_is_read_from_its_first_entry() -> None:
    assert cpu_fields(X86)["cpu"] == "GenuineIntel Xeon"
    assert cpu_fields(X86) == cpu_fields(X86.replace("sse avx fma", "fma sse avx"))
    assert differences(cpu_fields(X86), cpu_fields(X86.replace(" fma", ""))) == ["cpu.flags"]
    assert cpu_fields(ARM)["cpu"] == "0x41 0xd40"
    assert cpu_fields("")["cpu"] == "unknown"


def test_a_stack_may_not_overwrite_what_was_found() -> None:
    with pytest.raises(ValidationError, match="numpy"):
        collect({"numpy": "1.0"}, model="m")


@pytest.mark.parametrize(
    "fields",
    [{str(n): "" for n in range(MAX_FIELDS + 1)}, {"a": "x" * (MAX_LENGTH + 1)}, {"": "x"}, {"n" * 600: ""}],
)
def test_is_bounded(fields: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        check(fields)
