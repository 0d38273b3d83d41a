"""What can be chosen of the video world: which cache, how long a block; no PyTorch is needed to refuse it."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
from typer.testing import CliRunner

from worldmove.cli.commands import app
from worldmove.demo import programs
from worldmove.demo.video.shape import SHAPES, SMALL, add_options, chosen, options_for
from worldmove.errors import ConfigError


@pytest.mark.parametrize(("sink", "ring"), [(0, False), (3, False), (0, True), (6, True)])
@pytest.mark.parametrize("name", SHAPES)
def test_every_program_of_a_demo_has_the_cache_that_was_chosen(name: str, sink: int, ring: bool) -> None:
    play = programs.video(("cpu", "cpu"), options_for(name, sink=sink, ring=ring), 250.0)
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = parser.parse_args(programs.words(play.common))
    assert chosen(given) == dataclasses.replace(SHAPES[name], sink=sink, ring=ring)


@pytest.mark.parametrize("sink", [-3, 1, 9])
def test_a_sink_that_does_not_fit_the_shape_is_refused_by_name(sink: int) -> None:
    with pytest.raises(ConfigError, match=f"sink is {sink}; allowed: a multiple of a block's 3") as refused:
        options_for("small", sink=sink)
    assert refused.value.details["option"] == "sink"


def test_other_names_and_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="shape is 'large'; allowed: self-forcing, small"):
        options_for("large")
    with pytest.raises(ConfigError, match="block_ms is 0; allowed: 1 to 5000"):
        programs.video(("cpu", "cpu"), options_for("small"), 0.0)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ("--video small --sink 2", "sink is 2; allowed"),
        ("--gpu --sink 21", "sink is 21; allowed"),
        ("--sink 3", "sink is 3, but it is the video world's"),
        ("--ring", "ring is True, but it is the video world's"),
        ("--block-ms 100", "block_ms is 100.0, but it is the video world's"),
        ("--video small --block-ms 9000", "--block-ms"),
    ],
)
def test_the_command_refuses_them_before_anything_starts(options: str, word: str) -> None:
    done = CliRunner().invoke(app, ["demo", *options.split()])
    assert done.exit_code == 2
    assert word in " ".join(done.output.split())


def test_a_ring_has_no_stride() -> None:
    assert SMALL.stride_bytes > dataclasses.replace(SMALL, ring=True).stride_bytes == 0
