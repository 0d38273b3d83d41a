"""The reference world's decoder: latents to RGB frames, with a temporal memory like a video VAE's.

A latent frame becomes `FRAMES_PER_LATENT` pictures, interpolated from the decoder's memory of earlier
latents. The picture is a landscape under a moving sun: the latents raise its ridges, tint it, part its
clouds and ruffle its water; the camera flies where the player steers. Everything is float32 and
elementwise or a small matrix product on private arrays.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from worldmove.demo.model import BLOCK_LATENTS, CHANNELS, GRID, TOKENS, Floats

FRAMES_PER_LATENT = 4
BLOCK_FRAMES = BLOCK_LATENTS * FRAMES_PER_LATENT
WIDTH = 128
HEIGHT = 72
FRAME_BYTES = WIDTH * HEIGHT * 3
MEMORY_SHAPE = (TOKENS, CHANNELS)
"""Shape of the decoder's memory: a smoothed latent frame."""

Pixels = npt.NDArray[np.uint8]

_SMOOTHING = np.float32(0.5)
_RIDGES = 5
_SHORE = 0.80
_DAY_FRAMES = 640


class View(NamedTuple):
    """Camera of one picture: travel across and altitude, in frame widths; `clock` in frames."""

    travel: float
    altitude: float
    tilt: float
    clock: int


def decode(latents: Floats, memory: Floats, views: list[View]) -> Pixels:
    """Decodes one block.

    Args:
        latents: `[BLOCK_LATENTS, TOKENS, CHANNELS]`.
        memory: `[TOKENS, CHANNELS]`, the decoder's memory; updated in place.
        views: one camera per picture, `BLOCK_FRAMES` of them.

    Returns:
        `uint8[BLOCK_FRAMES, HEIGHT, WIDTH, 3]`.
    """
    fields = []
    smooth = np.array(memory, dtype=np.float32)
    for latent in latents:
        follow = smooth + _SMOOTHING * (latent - smooth)
        for step in range(1, FRAMES_PER_LATENT + 1):
            part = np.float32(step / FRAMES_PER_LATENT)
            fields.append(smooth + part * (follow - smooth))
        smooth = follow
    memory[...] = smooth
    return _paint(np.stack(fields), views)


def _paint(fields: Floats, views: list[View]) -> Pixels:
    """Paints `[pictures, TOKENS, CHANNELS]` fields as seen by `views`."""
    grid = fields.reshape(-1, *GRID, CHANNELS)
    rows = np.ascontiguousarray(np.moveaxis(grid, 3, 1)) @ _ACROSS  # [pictures, CHANNELS, 6, WIDTH]
    light = _Light.at(views)
    picture = _sky(rows, views, light)
    for ridge in range(_RIDGES):
        _ridge(picture, ridge, rows, views, light)
    _water(picture, rows, views, light)
    _glider(picture, rows, views, light)
    np.clip(picture, 0, 1, out=picture)
    return np.moveaxis(picture * np.float32(255) + np.float32(0.5), 1, -1).astype(np.uint8, order="C")


def _column(values: list[float]) -> Floats:
    """One number per picture, shaped to multiply `[pictures, HEIGHT, WIDTH]`."""
    return np.array(values, dtype=np.float32).reshape(-1, 1, 1)


class _Light(NamedTuple):
    """Colours and sun of each picture; colours `[pictures, 3]`, the rest `[pictures, 1, 1]`."""

    zenith: Floats
    horizon: Floats
    haze: Floats
    ground: Floats
    sun_x: Floats
    sun_y: Floats
    sun: Floats
    night: Floats

    @classmethod
    def at(cls, views: list[View]) -> _Light:
        hours = [(view.clock / _DAY_FRAMES + 0.02) % 1.0 for view in views]
        stop = [hour * len(_PALETTE) for hour in hours]
        low = np.array([int(value) for value in stop])
        part = _column([value - int(value) for value in stop])
        mixed = _PALETTE[low] * (1 - part) + _PALETTE[(low + 1) % len(_PALETTE)] * part
        heights = [math.sin(2 * math.pi * (hour + 0.02)) for hour in hours]
        return cls(
            zenith=mixed[:, 0],
            horizon=mixed[:, 1],
            haze=mixed[:, 2],
            ground=mixed[:, 3],
            sun_x=_column([(hour * 2 % 1.0) * 1.1 - 0.05 for hour in hours]),
            sun_y=_column([0.66 - 0.52 * abs(height) for height in heights]),
            sun=np.where(_column(heights) > 0, _SUN, _MOON).astype(np.float32),
            night=_column([min(1.0, max(0.0, -3 * height)) for height in heights]),
        )


def _sky(rows: Floats, views: list[View], light: _Light) -> Floats:
    """The picture's ground: `[pictures, 3, HEIGHT, WIDTH]`."""
    fade = np.clip(_Y / np.float32(0.7), 0, 1) ** np.float32(1.3)
    sky = light.zenith[:, :, None, None] * (1 - fade) + light.horizon[:, :, None, None] * fade
    sky = np.broadcast_to(sky, (len(views), 3, HEIGHT, WIDTH)).copy()
    stars = _STARS * light.night
    sky += stars[:, None]
    distance = ((_X - light.sun_x) * np.float32(WIDTH / HEIGHT)) ** 2 + (_Y - light.sun_y) ** 2
    glow = np.float32(0.32) * np.exp(distance * np.float32(-26.0))
    disk = np.clip((np.float32(0.055) - np.sqrt(distance)) * HEIGHT, 0, 1)
    colour = light.sun.reshape(-1, 3, 1, 1)
    sky += colour * (glow * (1 - np.float32(0.6) * light.night))[:, None]
    sky += (colour - sky) * disk[:, None]
    cloud = _DOWN @ rows[:, 5]
    drift = _column([view.travel * 2.2 for view in views])
    cloud += np.float32(0.5) * np.sin(np.float32(9.0) * (_X + drift) + np.float32(17.0) * _Y)
    cloud += np.float32(0.35) * np.sin(np.float32(21.0) * (_X + drift) - np.float32(31.0) * _Y)
    cover = np.clip(cloud - np.float32(0.1), 0, 1) * np.clip(np.float32(1.5) - np.float32(2.2) * _Y, 0, 0.65)
    white = light.horizon * np.float32(0.6) + np.float32(0.4) * (1 - light.night[:, :, 0])
    sky += (white[:, :, None, None] - sky) * cover[:, None]
    return sky


def _ridge(picture: Floats, ridge: int, rows: Floats, views: list[View], light: _Light) -> None:
    """Paints one ridge, far to near, over the picture."""
    near = ridge / (_RIDGES - 1)
    x = _X[0] * np.float32(1.0) + np.array(
        [[view.travel * (0.25 + 1.6 * near)] for view in views], dtype=np.float32
    )
    shape = np.zeros_like(x)
    for octave, (wave, phase) in enumerate(_WAVES[ridge]):
        shape += np.float32(0.55**octave) * np.sin(np.float32(wave) * x + np.float32(phase))
    lift = np.array([[view.altitude * (0.03 + 0.10 * near)] for view in views], dtype=np.float32)
    height = np.float32(0.60 + 0.17 * near) + lift
    height = height - np.float32(0.075 - 0.03 * near) * shape - np.float32(0.07) * rows[:, 0, ridge]
    slope = np.gradient(height, axis=1) * np.float32(WIDTH)
    below = _Y - height[:, None]
    alpha = np.clip(below * HEIGHT + np.float32(0.5), 0, 1)
    tint = np.float32(0.10) * rows[:, 1:4, ridge]  # [pictures, 3, WIDTH]
    colour = light.haze * np.float32(1 - near) + light.ground * np.float32(near)
    shade = np.float32(1) - np.float32(0.22) * np.tanh(slope)[:, None, :]
    band = (colour[:, :, None] + tint * np.float32(0.4 + 0.6 * near)) * shade
    mist = np.clip(below * np.float32(3.2), 0, 0.55)[:, None] * np.float32(1 - 0.7 * near)
    paint = band[:, :, None] + (light.horizon[:, :, None, None] - band[:, :, None]) * mist
    if ridge < 2:
        snow = np.clip((np.float32(0.045) - below) * np.float32(30), 0, 1)
        snow = snow * np.clip((np.float32(0.58) - height) * np.float32(18), 0, 0.8)[:, None]
        paint = (
            paint
            + (np.float32(0.25) + np.float32(0.75) * light.horizon[:, :, None, None] - paint) * snow[:, None]
        )
    picture += (paint - picture) * alpha[:, None]


def _water(picture: Floats, rows: Floats, views: list[View], light: _Light) -> None:
    """Turns what lies below the shore into water that mirrors what stands above it."""
    shore = int(HEIGHT * _SHORE)
    depth = np.arange(HEIGHT - shore, dtype=np.float32)
    travel = np.array([view.travel for view in views], dtype=np.float32)[:, None, None]
    clock = np.array([view.clock % 1024 for view in views], dtype=np.float32)[:, None, None]
    ripple = np.sin(
        np.float32(26.0) * (_X[0] + travel * 1.5)
        + depth[:, None] * np.float32(1.9)
        + clock * np.float32(0.35)
    )
    ripple = ripple + np.float32(2.0) * rows[:, 6, 5][:, None, :]
    source = (
        shore
        - 1
        - depth[:, None] * np.float32(1.6)
        + ripple * (np.float32(0.4) + depth[:, None] * np.float32(0.09))
    )
    index = np.clip(source, 0, shore - 1).astype(np.int64)[:, None]
    mirrored = np.take_along_axis(
        picture[:, :, :shore], np.broadcast_to(index, (len(views), 3, *index.shape[2:])), axis=2
    )
    deep = light.zenith[:, :, None, None] * np.float32(0.55)
    amount = (np.float32(0.25) + depth * np.float32(0.02))[:, None]
    water = mirrored + (deep - mirrored) * amount
    glint = np.clip(ripple - np.float32(0.9), 0, 1) * np.float32(0.18)
    picture[:, :, shore:] = water + glint[:, None] * light.horizon[:, :, None, None]


def _glider(picture: Floats, rows: Floats, views: list[View], light: _Light) -> None:
    """Paints the player: a small bright glider whose wings follow its tilt."""
    bob = rows[:, 7, 2, WIDTH // 2].reshape(-1, 1, 1) * np.float32(0.02)
    across = (_X - np.float32(0.42)) * np.float32(WIDTH / HEIGHT)
    tilt = _column([view.tilt for view in views])
    height = np.float32(0.36) + bob - _column([view.altitude * 0.12 for view in views])
    wing = height + tilt * across * np.float32(0.8) - np.float32(0.35) * np.abs(across)
    thick = np.clip(np.float32(0.020) - np.float32(0.16) * np.abs(across), 0, 1)
    alpha = np.clip((thick - np.abs(_Y - wing)) * HEIGHT + np.float32(0.5), 0, 1)
    alpha = alpha * (np.abs(across) < np.float32(0.12))
    colour = np.float32(0.97) - np.float32(0.25) * light.night
    picture += (colour[:, None] - picture) * alpha[:, None]


def _spread(inputs: int, outputs: int) -> Floats:
    """Matrix `[inputs, outputs]` of smooth (cosine) interpolation over the same span."""
    at = (np.arange(outputs) + 0.5) / outputs * inputs - 0.5
    at = np.clip(at, 0, inputs - 1)
    low = np.minimum(at.astype(np.int64), inputs - 2)
    part = 0.5 - 0.5 * np.cos(np.pi * (at - low))
    matrix = np.zeros((inputs, outputs), dtype=np.float32)
    matrix[low, np.arange(outputs)] = 1 - part
    matrix[low + 1, np.arange(outputs)] += part
    return matrix


def _colours(*rows: str) -> Floats:
    return np.array([[int(row[i : i + 2], 16) / 255 for i in (0, 2, 4)] for row in rows], dtype=np.float32)


_ACROSS = _spread(GRID[1], WIDTH)
_DOWN = np.ascontiguousarray(_spread(GRID[0], HEIGHT).T)
_X = ((np.arange(WIDTH, dtype=np.float32) + np.float32(0.5)) / np.float32(WIDTH)).reshape(1, WIDTH)
_Y = ((np.arange(HEIGHT, dtype=np.float32) + np.float32(0.5)) / np.float32(HEIGHT)).reshape(HEIGHT, 1)
_SUN = _colours("fff3d0").reshape(1, 3, 1)
_MOON = _colours("dfe8ff").reshape(1, 3, 1)
_PALETTE = np.stack(
    [
        # zenith, horizon, far ridges, near ridges
        _colours("3b4f8f", "ffb37a", "b78aa0", "33304f"),
        _colours("3f83cf", "cfe6f5", "9db8d3", "2f5a44"),
        _colours("2f74c6", "e3f0f4", "a3bdd2", "3b6b3a"),
        _colours("4a6fb5", "ffd9a0", "b79aa6", "4b4b3c"),
        _colours("46336e", "ff7f5c", "8d5a7a", "2b2038"),
        _colours("131a3e", "3d3a6b", "33345f", "10122a"),
        _colours("0b1030", "28325e", "262c54", "0c1022"),
        _colours("1c2450", "7a5a86", "544a78", "191a36"),
    ]
)
_WAVES = [
    [
        (wave * (1 + 0.13 * ridge), 1.7 * ridge + 2.3 * number)
        for number, wave in enumerate((5.1, 11.3, 23.9, 47.3))
    ]
    for ridge in range(_RIDGES)
]


def _scatter_stars() -> Floats:
    draw = np.random.Generator(np.random.Philox(key=5))
    stars = draw.random((HEIGHT, WIDTH), dtype=np.float32)
    bright: Floats = np.where(stars > np.float32(0.985), (stars - np.float32(0.985)) * 60, 0).astype(
        np.float32
    )
    return bright


_STARS = _scatter_stars()
