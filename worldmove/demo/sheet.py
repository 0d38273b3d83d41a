"""The contact sheet: one row of pictures per stay on a node, one band per move between them.

The last picture of a row and the first of the next are neighbours in the film: what the eye sees there
is the move. A green bar under a picture says that it equals the twin's, a red one that it doesn't.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from worldmove.demo.frames import HEIGHT, WIDTH, Pixels

PICTURES_A_ROW = 6
MAX_STAYS = 13
"""More stays than this are left out in the middle, and the sheet says so."""

_THUMB = (WIDTH * 7 // 4, HEIGHT * 7 // 4)
_GAP = 10
_MARGIN = 36
_LABEL = 128
_HEAD = 104
_FOOT = 28
_ROW = _THUMB[1] + 34
_BAND = 50
_BACKGROUND = (17, 19, 25)
_PANEL = (27, 30, 39)
_TEXT = (232, 235, 242)
_FAINT = (142, 150, 166)
_GOOD = (92, 200, 132)
_BAD = (235, 87, 87)
_ACCENTS = ((86, 182, 240), (246, 173, 85), (190, 140, 255), (120, 210, 170))

Colour = tuple[int, int, int]


class Picture(NamedTuple):
    """One picture of the film; `equal`: bit for bit the twin's. Frames count from 1."""

    frame: int
    pixels: Pixels
    equal: bool


class Stay(NamedTuple):
    """The time on one node: its first and last frame, and the pictures to show of it."""

    node: str
    first: int
    last: int
    pictures: Sequence[Picture]


class Change(NamedTuple):
    """One move, in words: `facts` go on the band, `good` tells whether its roots were equal."""

    title: str
    facts: Sequence[str]
    good: bool


def pick(first: int, last: int, count: int = PICTURES_A_ROW) -> list[int]:
    """At most `count` frame numbers from `first` to `last`, evenly spaced, both ends among them."""
    frames = last - first
    if frames < 0 or count < 1:
        return []
    if count == 1 or frames == 0:
        return [first]
    count = min(count, frames + 1)
    return [first + round(index * frames / (count - 1)) for index in range(count)]


def draw(
    title: str, subtitle: str, stays: Sequence[Stay], changes: Sequence[Change], good: bool
) -> Image.Image:
    """Draws the sheet.

    Args:
        title: what is shown.
        subtitle: the verdict, one line; green where `good`, red where not.
        stays: in the order of the film.
        changes: `changes[i]` lies between `stays[i]` and `stays[i + 1]`.
        good: whether the demo's claims held.
    """
    shown = _shown(len(stays))
    nodes = sorted({stay.node for stay in stays})
    width = 2 * _MARGIN + _LABEL + PICTURES_A_ROW * (_THUMB[0] + _GAP) - _GAP
    height = _HEAD + len(shown) * _ROW + max(len(shown) - 1, 0) * _BAND + _FOOT
    sheet = Image.new("RGB", (width, height), _BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    pen.text((_MARGIN, 26), title, _TEXT, font=_font(28))
    pen.text((_MARGIN, 66), _short(subtitle, 170), _GOOD if good else _BAD, font=_font(17))
    top = _HEAD
    for position, number in enumerate(shown):
        if position:
            hidden = number - shown[position - 1] - 1
            accents = (_accent(nodes, stays[number - 1].node), _accent(nodes, stays[number].node))
            _band(pen, top, width, change=_change(changes, number), hidden=hidden, accents=accents)
            top += _BAND
        _row(sheet, pen, top, stays[number], _accent(nodes, stays[number].node))
        top += _ROW
    return sheet


def _shown(stays: int) -> list[int]:
    if stays <= MAX_STAYS:
        return list(range(stays))
    half = MAX_STAYS // 2
    return [*range(MAX_STAYS - half), *range(stays - half, stays)]


def _change(changes: Sequence[Change], number: int) -> Change:
    """The move before stay `number`; a film that went wrong may have more stays than moves."""
    return changes[number - 1] if number <= len(changes) else Change("no move", (), good=False)


def _row(sheet: Image.Image, pen: ImageDraw.ImageDraw, top: int, stay: Stay, accent: Colour) -> None:
    pen.rounded_rectangle((_MARGIN, top, _MARGIN + _LABEL - 18, top + _THUMB[1]), 10, _PANEL)
    pen.rounded_rectangle((_MARGIN, top, _MARGIN + 5, top + _THUMB[1]), 2, accent)
    pen.text((_MARGIN + 20, top + 14), "node", _FAINT, font=_font(14))
    pen.text(
        (_MARGIN + 20, top + 30), _short(stay.node, 7), accent, font=_font(30 if len(stay.node) < 4 else 18)
    )
    pen.text((_MARGIN + 20, top + _THUMB[1] - 46), "frames", _FAINT, font=_font(14))
    pen.text((_MARGIN + 20, top + _THUMB[1] - 28), f"{stay.first}-{stay.last}", _TEXT, font=_font(15))
    for index, picture in enumerate(stay.pictures[:PICTURES_A_ROW]):
        left = _MARGIN + _LABEL + index * (_THUMB[0] + _GAP)
        thumb = Image.fromarray(picture.pixels).resize(_THUMB, Image.Resampling.LANCZOS)
        sheet.paste(thumb, (left, top))
        mark = _GOOD if picture.equal else _BAD
        pen.rectangle((left, top + _THUMB[1], left + _THUMB[0] - 1, top + _THUMB[1] + 3), mark)
        pen.text((left + 2, top + _THUMB[1] + 9), f"frame {picture.frame}", _FAINT, font=_font(13))
        verdict = "= twin" if picture.equal else "differs from the twin"
        pen.text((left + _THUMB[0] - 2, top + _THUMB[1] + 9), verdict, mark, font=_font(13), anchor="ra")


def _band(
    pen: ImageDraw.ImageDraw,
    top: int,
    width: int,
    *,
    change: Change,
    hidden: int,
    accents: tuple[Colour, Colour],
) -> None:
    middle = top + (_BAND - 12) // 2
    pen.rounded_rectangle((_MARGIN, top, width - _MARGIN, top + _BAND - 12), 8, _PANEL)
    pen.rectangle((_MARGIN, top + 4, _MARGIN + 4, middle), accents[0])
    pen.rectangle((_MARGIN, middle, _MARGIN + 4, top + _BAND - 16), accents[1])
    _arrow(pen, _MARGIN + 28, middle, accents)
    pen.text((_MARGIN + 72, middle), change.title, _TEXT, font=_font(17), anchor="lm")
    facts = list(change.facts) if not hidden else [f"{hidden} moves before this one not shown", *change.facts]
    left = _MARGIN + _LABEL + 100
    pen.text((left, middle), "   ·   ".join(facts), _FAINT, font=_font(15), anchor="lm")
    verdict = "roots equal" if change.good else "ROOTS DIFFER"
    mark = _GOOD if change.good else _BAD
    pen.text((width - _MARGIN - 16, middle), verdict, mark, font=_font(15), anchor="rm")


def _arrow(pen: ImageDraw.ImageDraw, left: int, middle: int, accents: tuple[Colour, Colour]) -> None:
    """Two dots and an arrow: from one node's colour to the other's."""
    pen.ellipse((left - 12, middle - 5, left - 2, middle + 5), accents[0])
    pen.line((left + 2, middle, left + 14, middle), _FAINT, 2)
    pen.polygon([(left + 12, middle - 4), (left + 18, middle), (left + 12, middle + 4)], _FAINT)
    pen.ellipse((left + 21, middle - 5, left + 31, middle + 5), accents[1])


def _accent(nodes: Sequence[str], node: str) -> Colour:
    return _ACCENTS[nodes.index(node) % len(_ACCENTS)]


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
