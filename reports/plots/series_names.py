"""The names of the series and the rows of a figure, written where there is room."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from reports.document import Size
from reports.plots.figure import CHARACTER_PIXELS, PALETTE, PIXELS_PER_INCH, series_colour

NAME_LINE_PIXELS = 15


def name_series(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str] = ()) -> None:
    """Write the names of the series in their colours, in one row above the axes at the right.

    A single series is not named. Names that do not fit are cut, or in a narrow figure put in rows above the axis title.
    """
    if len(labels) < 2:
        return
    colours = colours or [series_colour(index) for index in range(len(labels))]
    room = (size.width - 180) / CHARACTER_PIXELS
    fits = sum(len(label) + 2 for label in labels) <= room
    if size.is_narrow and not fits:
        _name_above(axes, labels, size, colours)
        return
    most = max(4, int(room / len(labels)) - 2)
    offset = 0.0
    for index in reversed(range(len(labels))):
        text = labels[index] if fits else _shortened(labels[index], most)
        axes.annotate(
            text,
            (1.0, 1.0),
            xycoords="axes fraction",
            xytext=(-offset * 72 / PIXELS_PER_INCH, 9),
            textcoords="offset points",
            ha="right",
            color=colours[index],
            fontweight="bold",
        )
        offset += (len(text) + 2) * CHARACTER_PIXELS


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _name_above(axes: Axes, labels: Sequence[str], size: Size, colours: Sequence[str]) -> None:
    """Write the names in rows above the axis title, and make the axes lower by the height of these rows."""
    room = size.width - 90
    labels = [_shortened(label, int(room / CHARACTER_PIXELS)) for label in labels]
    lines = _name_lines(labels, room)
    box, line = axes.get_position(), NAME_LINE_PIXELS / size.height
    axes.set_position((box.x0, box.y0, box.width, box.height - line * (1 + max(row for row, _ in lines))))
    for label, colour, (row, offset) in zip(labels, colours, lines, strict=True):
        axes.annotate(
            label,
            (0.0, 1.0),
            xycoords="axes fraction",
            xytext=(offset * 72 / PIXELS_PER_INCH, (28 + NAME_LINE_PIXELS * row) * 72 / PIXELS_PER_INCH),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            fontsize=8.0,
        )


def _name_lines(names: Sequence[str], room: float) -> list[tuple[int, float]]:
    """Line number (0 is next to the axes) and offset in pixels of each name above a narrow figure."""
    row, offset, found = 0, 0.0, []
    for name in names:
        width = len(name) * CHARACTER_PIXELS
        if offset and offset + width > room:
            row, offset = row + 1, 0.0
        found.append((row, offset))
        offset += width + 1.5 * CHARACTER_PIXELS
    return found


def name_rows(axes: Axes, names: Sequence[str], size: Size) -> None:
    """Write the names of rows at the left; in a narrow figure, above each row."""
    axes.set_ylim(-0.5, len(names) - (0.25 if size.is_narrow else 0.5))
    if not size.is_narrow:
        axes.set_yticks(range(len(names)), names)
        return
    axes.set_yticks([])
    for row, name in enumerate(names):
        axes.text(0.0, row + 0.32, name, transform=axes.get_yaxis_transform(), color=PALETTE["muted"])
