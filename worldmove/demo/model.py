"""The reference world's network: a small causal transformer over latent frames, in NumPy.

It has the shape of the autoregressive video models that WorldMove serves: a block of latent frames is
denoised in a few forward passes that attend to a window of earlier frames through a key/value cache,
then one more pass at t = 0 yields the keys and values that the cache keeps. The sampler is the one of
few-step distilled models: predict the clean latent, add fresh noise of the next, lower level.

The weights are not trained. They come from a seed and are arranged so that a token knows which part of
the world it shows, attends to the same part in earlier frames and reads back what was there; that makes
a continuous film. Everything is float32 on private, contiguous arrays, so the result does not depend on
where the cache lies in memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

LAYERS = 4
HEADS = 4
HEAD_DIM = 32
WIDTH = HEADS * HEAD_DIM
HIDDEN = 2 * WIDTH
CHANNELS = 16
GRID = (6, 8)
"""Latent tokens of one frame: rows, columns."""
TOKENS = GRID[0] * GRID[1]
BLOCK_LATENTS = 3
BLOCK_TOKENS = BLOCK_LATENTS * TOKENS
LEVELS = (1.0, 0.75, 0.5, 0.25)
"""Noise levels of the forward passes that denoise a block."""
KEY_INPUTS = 4
SHARPNESS = 10.0
"""Factor on the cosine of query and key: how local attention is. `exp` of it stays far from overflow."""

_ACROSS = ((0.37, 0.0), (0.83, 1.0), (1.31, 2.0), (2.2, 3.0), (3.1, 4.0))
_DOWN = ((0.5, 0.0), (1.0, 0.0), (2.0, 0.0))


class Context(NamedTuple):
    """What one layer sees of earlier frames.

    Attributes:
        keys: `[HEADS, HEAD_DIM, rows]`, contiguous.
        values: `[HEADS, rows, HEAD_DIM]`, contiguous.
    """

    keys: Floats
    values: Floats

    @classmethod
    def of(cls, keys: Floats, values: Floats) -> Context:
        """Builds a context from `[rows, WIDTH]` keys and values; there may be no rows."""
        return cls(
            np.ascontiguousarray(keys.reshape(-1, HEADS, HEAD_DIM).transpose(1, 2, 0)),
            np.ascontiguousarray(values.reshape(-1, HEADS, HEAD_DIM).transpose(1, 0, 2)),
        )


class Rows(NamedTuple):
    """Keys and values of one clean block in one layer, each `[BLOCK_TOKENS, WIDTH]`."""

    keys: Floats
    values: Floats


class _Layer(NamedTuple):
    query: Floats
    key: Floats
    value: Floats
    out: Floats
    up: Floats
    down: Floats


class Model:
    """Weights and forward passes; holds no state of any world.

    Attributes:
        seed: what all weights come from.
        digest: BLAKE2b-256 of all weights (hex); equal on two hosts that hold the same model.
    """

    def __init__(self, seed: int = 7) -> None:
        self.seed = seed
        draw = _Weights(seed)
        self._embed = draw(CHANNELS, WIDTH, scale=CHANNELS**-0.5)
        self._place = draw(2 * len(_ACROSS + _DOWN), WIDTH, scale=0.375)
        self._order = draw(BLOCK_LATENTS, 1, WIDTH, scale=0.15)
        self._level = draw(2, WIDTH, scale=0.3)
        self._keys = draw(KEY_INPUTS, WIDTH, scale=0.25)
        self._layers = tuple(_layer(draw) for _ in range(LAYERS))
        self._readout = np.ascontiguousarray(self._embed.T)
        self.digest = self._digest()

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=32)
        arrays = [self._embed, self._place, self._order, self._level, self._keys]
        for array in [*arrays, *(weight for layer in self._layers for weight in layer)]:
            digest.update(repr(array.shape).encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def denoise(
        self, noise: Floats, keys: Floats, places: Floats, contexts: Sequence[Context]
    ) -> tuple[Floats, list[Rows]]:
        """Generates one block.

        Args:
            noise: `[len(LEVELS), BLOCK_TOKENS, CHANNELS]`, standard normal.
            keys: the player's keys, `[KEY_INPUTS]`, 0 or 1.
            places: `[BLOCK_LATENTS, 2]`, how far each frame has travelled across and down, in frames.
            contexts: earlier frames, one per layer.

        Returns:
            The latents `[BLOCK_LATENTS, TOKENS, CHANNELS]`, each in -1 to 1, and for every layer what
            its cache keeps of the block.
        """
        ground = _positions(places) @ self._place
        base = ground + self._order + keys @ self._keys
        latents = noise[0]
        for step, level in enumerate(LEVELS):
            latents, _ = self._forward(latents, level, base, ground, contexts)
            if step + 1 < len(LEVELS):
                follow = np.float32(LEVELS[step + 1])
                latents = (1 - follow) * latents + follow * noise[step + 1]
        _, rows = self._forward(latents, 0.0, base, ground, contexts)
        return latents.reshape(BLOCK_LATENTS, TOKENS, CHANNELS), rows

    def _forward(
        self, latents: Floats, level: float, base: Floats, ground: Floats, contexts: Sequence[Context]
    ) -> tuple[Floats, list[Rows]]:
        turn = np.array([math.cos(level * math.pi), math.sin(level * math.pi)], dtype=np.float32)
        hidden = (latents @ self._embed) * np.float32(1.0 - 0.9 * level)
        hidden = hidden + (base + turn @ self._level).reshape(BLOCK_TOKENS, WIDTH)
        rows = []
        for layer, context in zip(self._layers, contexts, strict=True):
            normal = _normalise(hidden)
            own = Rows(_normalise_heads(normal @ layer.key), normal @ layer.value)
            rows.append(own)
            query = _normalise_heads(normal @ layer.query)
            hidden = hidden + _attend(query, own, context) @ layer.out
            hidden = hidden + np.tanh(_normalise(hidden) @ layer.up) @ layer.down
        content = (hidden - ground.reshape(BLOCK_TOKENS, WIDTH)) @ self._readout
        frames = content.reshape(BLOCK_LATENTS, TOKENS, CHANNELS)
        frames = frames - np.float32(0.5) * frames.mean(axis=1, keepdims=True)
        clean: Floats = np.tanh(np.float32(0.8) * _normalise(frames.reshape(BLOCK_TOKENS, CHANNELS)))
        return clean, rows


class _Weights:
    """Draws arrays one after another from one stream."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.Generator(np.random.Philox(key=seed))

    def __call__(self, *shape: int, scale: float) -> Floats:
        return self._rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)


def _layer(draw: _Weights) -> _Layer:
    shared = draw(WIDTH, WIDTH, scale=WIDTH**-0.5)
    value = draw(WIDTH, WIDTH, scale=WIDTH**-0.5)
    return _Layer(
        query=shared + draw(WIDTH, WIDTH, scale=0.1 * WIDTH**-0.5),
        key=shared,
        value=value,
        out=np.ascontiguousarray(value.T) * np.float32(0.35),
        up=draw(WIDTH, HIDDEN, scale=WIDTH**-0.5),
        down=draw(HIDDEN, WIDTH, scale=0.25 * HIDDEN**-0.5),
    )


def _positions(places: Floats) -> Floats:
    """Smooth features of the part of the world that each token shows, `[BLOCK_LATENTS, TOKENS, n]`."""
    row, column = np.meshgrid(*(np.linspace(0, 1, count) for count in GRID), indexing="ij")
    across = places[:, :1].astype(np.float64) + column.ravel()
    down = places[:, 1:].astype(np.float64) + row.ravel()
    waves = [
        wave(math.pi * octave * axis + phase)
        for axis, octaves in ((across, _ACROSS), (down, _DOWN))
        for octave, phase in octaves
        for wave in (np.sin, np.cos)
    ]
    features: Floats = np.stack(waves, axis=-1).astype(np.float32)
    return features


def _normalise(rows: Floats) -> Floats:
    """RMS norm of every row."""
    normal: Floats = rows / np.sqrt(np.mean(rows * rows, axis=-1, keepdims=True) + np.float32(1e-6))
    return normal


def _normalise_heads(rows: Floats) -> Floats:
    """Scales every head's part of a row to length 1, so that attention compares directions."""
    heads = rows.reshape(-1, HEADS, HEAD_DIM)
    length = np.sqrt(np.sum(heads * heads, axis=-1, keepdims=True) + np.float32(1e-6))
    return np.ascontiguousarray(heads / length).reshape(-1, WIDTH)


def _attend(query: Floats, own: Rows, context: Context) -> Floats:
    """Softmax attention of `[BLOCK_TOKENS, WIDTH]` queries over earlier rows and the block's own."""
    heads = np.ascontiguousarray(query.reshape(-1, HEADS, HEAD_DIM).transpose(1, 0, 2))
    heads *= np.float32(SHARPNESS)
    total: Floats = np.zeros((*heads.shape[:2], 1), dtype=np.float32)
    mixed: Floats = np.zeros_like(heads)
    for part in (context, Context.of(own.keys, own.values)):
        weights = heads @ part.keys
        np.exp(weights, out=weights)
        total += weights.sum(axis=-1, keepdims=True)
        mixed += weights @ part.values
    mixed /= total
    return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(-1, WIDTH)
