"""Sizes of the video world, with those of a published model and small ones for tests.

`SELF_FORCING` has the state of Self-Forcing on Wan 2.1 1.3B at 832 × 480: per layer a rolling key and value
cache of `[1, 32760, 12, 128]` bfloat16, 6.04 GB in all. Weights are random; shapes, order of the work and
bytes are what matters to a move, not the pictures.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

from worldmove.errors import ConfigError

PATCH = 2
"""Latent pixels of a token along each side."""
CACHES = ("rolling", "ring")
"""How a full cache takes a block: see `Shape.ring`."""


@dataclass(frozen=True)
class Shape:
    """A world's sizes. A latent frame is `[channels, 2 * rows, 2 * columns]`; a token covers 2 × 2 of it.

    Attributes:
        layers: transformer layers.
        heads: attention heads, of `head_dim` each; their product is the width.
        head_dim: a multiple of 8, for the rotary codes of three axes.
        ffn: width of the hidden layer of each MLP.
        rows: tokens of a frame downwards.
        columns: tokens of a frame across.
        window: latent frames that the caches hold; a multiple of `block`.
        block: latent frames that one block generates.
        channels: of a latent.
        text: tokens of the prompt, whose keys and values the cross-attention caches hold.
        sigmas: noise levels of the denoising passes; one clean pass follows.
        decoder: channels of the decoder's hidden frames, which it remembers from block to block.
        sink: first frames of the window that never leave it.
        ring: the newest block overwrites the oldest in place, instead of everything moving left.

    Raises:
        ConfigError: sizes that don't fit each other.
    """

    layers: int = 30
    heads: int = 12
    head_dim: int = 128
    ffn: int = 8960
    rows: int = 30
    columns: int = 52
    window: int = 21
    block: int = 3
    channels: int = 16
    text: int = 512
    sigmas: tuple[float, ...] = (1.0, 0.9375, 0.8333, 0.625)
    decoder: int = 96
    sink: int = 0
    ring: bool = False

    def __post_init__(self) -> None:
        if self.window % self.block:
            raise ConfigError(
                f"window is {self.window}; a multiple of a block's {self.block} is allowed", option="window"
            )
        if self.sink < 0 or self.sink % self.block or self.sink + self.block > self.window:
            raise ConfigError(
                f"sink is {self.sink}; allowed: a multiple of a block's {self.block} latent frames, at most "
                f"{self.window - self.block}, which leaves a block of the window's {self.window}",
                option="sink",
            )
        if self.head_dim % 8 or min(self.layers, self.heads, self.rows, self.columns) < 1:
            raise ConfigError(f"head_dim is {self.head_dim}; a multiple of 8 is allowed", option="head_dim")

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim

    @property
    def frame_tokens(self) -> int:
        """Tokens of a latent frame."""
        return self.rows * self.columns

    @property
    def block_tokens(self) -> int:
        """Tokens of a block: what the caches move by."""
        return self.block * self.frame_tokens

    @property
    def cache(self) -> tuple[int, int, int, int]:
        """Shape of one layer's keys, or values."""
        return (1, self.window * self.frame_tokens, self.heads, self.head_dim)

    @property
    def stride_bytes(self) -> int:
        """By how many bytes a cache moves at each block; 0 for a ring, which does not."""
        return 0 if self.ring else self.block_tokens * self.width * 2


SELF_FORCING = Shape()
SMALL = Shape(
    layers=2,
    heads=2,
    head_dim=32,
    ffn=128,
    rows=4,
    columns=8,
    window=9,
    text=8,
    decoder=8,
)
SHAPES = {"self-forcing": SELF_FORCING, "small": SMALL}


def options_for(name: str, *, sink: int = 0, ring: bool = False) -> dict[str, str]:
    """What `add_options` and `chosen` understand, for the programs of a named shape with another cache.

    Args:
        name: in `SHAPES`.
        sink: latent frames that stay at the cache's beginning.
        ring: see `Shape`.

    Raises:
        ConfigError: there is no such shape, or its window has no room for such a sink.
    """
    if name not in SHAPES:
        raise ConfigError(f"shape is {name!r}; allowed: {', '.join(SHAPES)}", option="shape")
    replace(SHAPES[name], sink=sink, ring=ring)
    return {"shape": name, "sink": str(sink), "cache": CACHES[ring]}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `options_for` to a program's."""
    parser.add_argument("--shape", choices=tuple(SHAPES), required=True)
    parser.add_argument("--sink", type=int, default=0)
    parser.add_argument("--cache", choices=CACHES, default=CACHES[False])


def chosen(given: argparse.Namespace) -> Shape:
    """The shape that a program was given."""
    return replace(SHAPES[given.shape], sink=given.sink, ring=given.cache == CACHES[True])
