"""`python tools/fuzz [--seconds 600] [--target NAME]`: fuzzes every decoder for its share of the time.

With atheris (the extra `fuzz`) it is guided by the coverage of our own code, one process for each target,
and inputs that reached something new are kept in `.fuzz/NAME`. Without it hypothesis makes the inputs. A
finding ends the run with exit code 1; atheris writes its input to `.fuzz/NAME/crash-...`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
FOLDER = Path(".fuzz")
MAX_INPUT = 64 * 1024
ROUND_EXAMPLES = 2000


def guided(name: str, seconds: int) -> None:
    """Fuzzes one target with atheris; does not return."""
    import atheris  # noqa: PLC0415 - optional

    with atheris.instrument_imports(include=["worldmove", "targets"]):
        from targets import TARGETS  # noqa: PLC0415 - must be imported under instrumentation

    found = FOLDER / name
    options = [f"-max_total_time={seconds}", f"-max_len={MAX_INPUT}", "-timeout=20", "-rss_limit_mb=2048"]
    artifacts = f"-artifact_prefix={found}/"
    atheris.Setup([sys.argv[0], str(found), artifacts, "-verbosity=0", *options], TARGETS[name])
    atheris.Fuzz()


def random(name: str, seconds: int) -> None:
    """Fuzzes one target with hypothesis, round after round."""
    from hypothesis import HealthCheck, given, settings  # noqa: PLC0415
    from seeds import inputs  # noqa: PLC0415
    from targets import TARGETS  # noqa: PLC0415

    @settings(
        max_examples=ROUND_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(inputs(name))
    def once(data: bytes) -> None:
        TARGETS[name](data)

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        once()


def main() -> int:
    """Runs what the command line asks for; the exit code is 0 if nothing was found."""
    from seeds import write  # noqa: PLC0415
    from targets import TARGETS  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="fuzz")
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together")
    parser.add_argument("--target", choices=sorted(TARGETS))
    options = parser.parse_args()
    names = [options.target] if options.target else sorted(TARGETS)
    share = max(options.seconds // len(names), 1)
    with_atheris = find_spec("atheris") is not None
    how = "guided by coverage" if with_atheris else "at random: atheris is not installed"
    for name in names:
        print(f"fuzzing {name} for {share} s, {how}", flush=True)
        if with_atheris:
            write(name, FOLDER / name)
            command = [sys.executable, __file__, "--child", name, str(share)]
            answer = subprocess.run(command, check=False)
            if answer.returncode:
                print(f"{name}: a finding; the input lies in {FOLDER / name}", flush=True)
                return 1
        else:
            random(name, share)
    print("nothing was found", flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        guided(sys.argv[2], int(sys.argv[3]))
    raise SystemExit(main())
