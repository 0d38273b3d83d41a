"""Pictures as PNG files, drawn with matplotlib: an optional extra (`plot`), loaded for nothing else."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from worldmove.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".png"


def check(file: Path) -> None:
    """Checks, before anything is done for it, that a picture could be drawn and written.

    Raises:
        ConfigError: matplotlib is not installed; or the file is no `*.png`, or has no folder to lie in.
    """
    if find_spec("matplotlib") is None:
        raise ConfigError("pictures need matplotlib: pip install 'worldmove[plot]'", option="plot")
    if file.suffix.lower() != SUFFIX:
        raise ConfigError(
            f"plot is {str(file)!r}; a picture is a PNG, its name ends in {SUFFIX}", option="plot"
        )
    if not file.parent.is_dir():
        raise ConfigError(
            f"plot is {str(file)!r}, which can't be written: there is no folder {str(file.parent)!r}",
            option="plot",
        )


def new(width: float, height: float) -> Figure:
    """An empty figure of so many inches.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError("pictures need matplotlib: pip install 'worldmove[plot]'", option="plot") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, file: Path) -> None:
    """Writes a figure as PNG.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        figure.savefig(str(file), format="png")
    except OSError as error:
        raise ConfigError(
            f"plot is {str(file)!r}, which can't be written: {error.strerror}", option="plot"
        ) from error
