"""`worldmove demo`, `soak`, `bench`, `simulate`, `doctor`: thin, over programs that are loaded only then."""

from __future__ import annotations

from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from worldmove.cli.common import reporting
from worldmove.cli.move import Path as PathOption
from worldmove.cli.signals import at_once

bench_app = typer.Typer(
    help="Measure this machine; figures and bars: docs/benchmarks.md.", no_args_is_help=True
)

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of a table.")]
Repeats = Annotated[
    int | None, typer.Option(min=1, max=1000, show_default=False, help="Runs of each kind, taken in turn.")
]
Gpu = Annotated[bool, typer.Option("--gpu", help="On GPUs in place of host memory.")]


class VideoShape(StrEnum):
    """Shapes of the video world, as `worldmove.demo.video.shape` names them."""

    self_forcing = "self-forcing"
    small = "small"


def _run(module: str, *, json: bool, **given: Any) -> None:
    """Runs a program with the options that were given; its own defaults stand for the others."""
    with reporting(json):
        with at_once():
            program = import_module(module)
        code: int = program.run(
            json=json, **{name: value for name, value in given.items() if value is not None}
        )
    raise typer.Exit(code)


def demo(
    *,
    moves: Annotated[int, typer.Option(min=1, max=1000, help="How often the world changes its node.")] = 4,
    state_mb: Annotated[
        int | None,
        typer.Option(min=16, max=4096, show_default=False, help="Size of its state in MB. Default: 256."),
    ] = None,
    path: Annotated[PathOption, typer.Option(help="How bytes travel.")] = PathOption.auto,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu", help="A video transformer's world of 6 GB on two GPUs, or on one. With PyTorch."
        ),
    ] = False,
    video: Annotated[
        VideoShape | None,
        typer.Option(show_default=False, help="The video world in this shape; without --gpu on the CPU."),
    ] = None,
    sink: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=1000,
            show_default=False,
            help="Latent frames of the video world that stay cached.",
        ),
    ] = None,
    ring: Annotated[
        bool,
        typer.Option("--ring", help="The video world's newest block overwrites the oldest; no rolling."),
    ] = False,
    block_ms: Annotated[
        float | None,
        typer.Option(
            min=1, max=5000, show_default=False, help="How often a block of the video world begins, at least."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(show_default=False, help="Folder for the contact sheet and the frames.")
    ] = None,
    json: Json = False,
) -> None:
    """Move a world that generates there and back, and compare every frame with a twin that never moved."""
    _run(
        "worldmove.demo.run",
        json=json,
        moves=moves,
        state_mb=state_mb,
        path=path.value,
        out=out,
        gpu=gpu,
        video=None if video is None else video.value,
        sink=sink,
        ring=ring,
        block_ms=block_ms,
    )


def soak(
    *,
    moves: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many moves.")] = 100,
    seconds: Annotated[
        float | None, typer.Option(min=1, show_default=False, help="No move begins after so long.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=2, max=16, help="How many nodes.")] = 3,
    worlds: Annotated[int, typer.Option(min=1, max=16, help="How many worlds move about.")] = 2,
    state_mb: Annotated[int, typer.Option(min=1, max=1024, help="Size of each world in MB.")] = 8,
    seed: Annotated[
        int | None,
        typer.Option(min=0, show_default=False, help="Repeats the moves and faults of an earlier soak."),
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Goes on with this move of the seed's.")] = 1,
    gpus: Annotated[
        str, typer.Option(help="Worlds on GPUs, one for each node in turn: auto, or UUIDs by commas.")
    ] = "none",
    only: Annotated[
        str, typer.Option(show_default=False, help="What may go wrong, by commas: kill, executor-kill, …")
    ] = "",
    json: Json = False,
) -> None:
    """Move worlds between nodes while things go wrong, and compare every block with a twin."""
    _run(
        "worldmove.soak.run",
        json=json,
        moves=moves,
        seconds=seconds,
        nodes=nodes,
        worlds=worlds,
        state_mb=state_mb,
        seed=seed,
        first=first,
        gpus=gpus,
        only=only,
    )


def doctor(json: Json = False) -> None:
    """Examine this machine: what a node needs, what is missing, and what to do about it."""
    _run("worldmove.doctor.report", json=json)


class VerifyOption(StrEnum):
    """Where the receiver digests what lands."""

    scheduled = "scheduled"
    inline = "inline"


@bench_app.command("path")
def bench_path(
    *,
    gb: Annotated[
        float | None, typer.Option(min=0.01, max=64, show_default=False, help="Size of the state in GB.")
    ] = None,
    repeats: Repeats = None,
    gpu: Gpu = False,
    path: Annotated[
        PathOption | None, typer.Option(show_default=False, help="With --gpu: which way the moves take.")
    ] = None,
    verify: Annotated[
        VerifyOption | None,
        typer.Option(
            show_default=False,
            help="Lanes alone instead of a move: with and without the gate, with digests beside the wire; "
            "inline: also with digests in the receive path, to show how they stall it.",
        ),
    ] = None,
    senders: Annotated[int, typer.Option(min=1, max=16, help="With --verify: senders at once.")] = 1,
    json: Json = False,
) -> None:
    """A verified move between two nodes beside raw TCP and the lanes alone, or, on GPUs, a bare copy."""
    if verify is not None:
        inline = verify is VerifyOption.inline
        _run("worldmove.bench.receive", json=json, gb=gb, repeats=repeats, senders=senders, inline=inline)
    if gpu:
        way = None if path is None else path.value
        _run("worldmove.bench.gpu_path", json=json, gb=gb, repeats=repeats, path=way)
    if path is not None:
        raise typer.BadParameter("only with --gpu; host memory is measured on the path staged")
    _run("worldmove.bench.path", json=json, gb=gb, repeats=repeats)


@bench_app.command("digest")
def bench_digest(
    *,
    mb: Annotated[
        int | None, typer.Option(min=1, max=65536, show_default=False, help="MB digested in a run.")
    ] = None,
    executors: Annotated[
        int | None, typer.Option(min=1, max=64, show_default=False, help="Processes that digest.")
    ] = None,
    repeats: Repeats = None,
    gpu: Gpu = False,
    json: Json = False,
) -> None:
    """Leaf digests by the executor's processes beside stock xxhash, or, on a GPU, beside a plain read."""
    if gpu:
        if executors is not None:
            raise typer.BadParameter("a GPU has one executor", param_hint="--executors")
        _run("worldmove.bench.gpu_digest", json=json, mb=mb, repeats=repeats)
    _run("worldmove.bench.digest", json=json, mb=mb, executors=executors, repeats=repeats)


@bench_app.command("boundary")
def bench_boundary(
    *,
    calls: Annotated[
        int | None, typer.Option(min=100, max=10**7, show_default=False, help="Boundaries timed.")
    ] = None,
    json: Json = False,
) -> None:
    """What a boundary costs a worker while no move wants the state."""
    _run("worldmove.bench.boundary", json=json, calls=calls)


@bench_app.command("delta")
def bench_delta(
    *,
    mb: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=65536,
            show_default=False,
            help="Size of the state in MB; rounded to whole frames of the cache.",
        ),
    ] = None,
    gate_rate: Annotated[
        str | None, typer.Option(show_default=False, help="What a node lets in: 1Gbit; on GPUs no limit.")
    ] = None,
    block_ms: Annotated[
        float | None, typer.Option(min=1, max=60_000, show_default=False, help="How long a block takes.")
    ] = None,
    path: Annotated[
        PathOption | None,
        typer.Option(show_default=False, help="staged, if left out, or local; with --gpu direct."),
    ] = None,
    gpu: Gpu = False,
    repeats: Repeats = None,
    json: Json = False,
) -> None:
    """What a generating world's move sends, and how long it pauses, against a full resend in the same run."""
    way = None if path is None else path.value
    if way == "auto" or (way == "direct" and not gpu):
        raise typer.BadParameter("staged, local, or direct with --gpu", param_hint="--path")
    _run(
        "worldmove.bench.delta",
        json=json,
        mb=mb,
        gate_rate=gate_rate,
        block_ms=block_ms,
        path=way,
        gpu=gpu,
        repeats=repeats,
    )


@bench_app.command("scale")
def bench_scale(
    *,
    sessions: Annotated[
        int | None, typer.Option(min=1, max=10**6, show_default=False, help="Sessions at one node.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, max=5000, show_default=False, help="Worlds that generate meanwhile.")
    ] = None,
    moves: Annotated[
        int | None, typer.Option(min=1, max=1000, show_default=False, help="Moves asked for at once.")
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(min=1, max=10**6, show_default=False, help="Answers to measure while moves run."),
    ] = None,
    json: Json = False,
) -> None:
    """How a node answers that has thousands of sessions, hundreds of workers, and moves under way."""
    _run("worldmove.bench.scale", json=json, sessions=sessions, workers=workers, moves=moves, calls=calls)


@bench_app.command("gate")
def bench_gate(
    *,
    senders: Annotated[
        int | None, typer.Option(min=1, max=100, show_default=False, help="Hosts that moves come from.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=1, max=600, show_default=False, help="For which a load is offered.")
    ] = None,
    rate_mbit: Annotated[
        float | None,
        typer.Option(min=1, max=100_000, show_default=False, help="Of the shallow port, Mbit/s."),
    ] = None,
    loads: Annotated[
        list[float] | None,
        typer.Option(
            "--load",
            min=0.1,
            max=16,
            show_default=False,
            help="Bytes asked for, by what one sender brings; repeatable.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Real nodes behind a shallow port, offered up to four times what it carries; needs namespaces (root)."""
    _run(
        "worldmove.bench.lab.gate",
        json=json,
        senders=senders,
        seconds=seconds,
        rate_mbit=rate_mbit,
        loads=loads or None,
    )


def simulate(
    file: Annotated[Path, typer.Argument(help="The scenario, TOML: docs/simulator.md.")],
    *,
    plot: Annotated[
        Path | None, typer.Option(show_default=False, help="A PNG of it; needs worldmove[plot].")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(show_default=False, help="Output of `worldmove bench gate --json`, to stand beside it."),
    ] = None,
    json: Json = False,
) -> None:
    """Simulate moves of a fleet, with the admission and the gate that nodes have; for capacity planning."""
    _run("worldmove.simulate.run", json=json, file=file, plot=plot, compare=compare)
