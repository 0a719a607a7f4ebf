"""Words and shapes of a picture as SVG text: escaping, numbers, colours for light and dark.

Owns the look that the pictures share. A picture is one self-contained document: no script, no font, no address of
anything else. Does not own what is drawn (`picture`, `picture_timeline`).
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape as _escape

# About how wide a character is in the fonts that readers have: text cannot be measured here, so long words are cut.
CHARACTER = 6.9
BOLD = 1.13  # times as wide
NUM_COLOURS = 8
# By number, for a light and a dark ground; the lightness steps are even, so that they differ without colour too.
_LIGHT = ("#9ccbe6", "#f2c879", "#8fd4b4", "#e3a9c8", "#d9d388", "#f0a987", "#b7b5e8", "#c9ced3")
_DARK = ("#2c6285", "#7d5c14", "#23694a", "#7a3d5f", "#625d1b", "#83432a", "#4d4a8c", "#4a545d")
_BOTH = """
text { font: 12.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #16212b; }
.title { font-size: 17px; font-weight: 700; }
.strong { font-weight: 600; }
.soft { fill: #55636f; font-size: 11.5px; }
.small { font-size: 11px; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.ground { fill: #ffffff; }
.card { fill: #f4f6f8; stroke: #dce2e8; }
.rule { stroke: #dce2e8; fill: none; }
.box { stroke: #000000; stroke-opacity: 0.2; }
.spot { stroke: #16212b; stroke-opacity: 0.6; stroke-dasharray: 5 3; stroke-width: 1.4; }
.arrow { stroke: #55636f; stroke-width: 1.5; fill: none; }
.bar { fill: #ffffff; fill-opacity: 0.75; }
.used { fill: #16212b; fill-opacity: 0.7; }
.full { fill: #b3261e; }
.mark { fill: #a3480a; font-weight: 600; font-size: 11px; }
"""
_NIGHT = """
text { fill: #e6ecf1; }
.soft { fill: #9fb0bd; }
.ground { fill: #10161c; }
.card { fill: #182129; stroke: #2b3843; }
.rule { stroke: #2b3843; }
.box { stroke: #ffffff; }
.spot { stroke: #e6ecf1; }
.arrow { stroke: #9fb0bd; }
.bar { fill: #000000; fill-opacity: 0.45; }
.used { fill: #e6ecf1; }
.full { fill: #ff8478; }
.mark { fill: #f08a45; }
"""
# XML has no way to write these at all, escaped or not.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def escape(text: str) -> str:
    """As character data or within double quotes, in ASCII: a picture is read rightly whatever a server says of it."""
    written = _escape(_UNWRITABLE.sub("\ufffd", text), {'"': "&quot;"})
    return written.encode("ascii", "xmlcharrefreplace").decode()


def number(value: float) -> str:
    """With a tenth of a unit, which is less than anybody sees."""
    return f"{value:.1f}".removesuffix(".0")


def fit(width: float, *choices: str) -> str:
    """The first of the texts that has room in this width, or else the last, cut."""
    room = int(width / CHARACTER)
    for choice in choices:
        if len(choice) <= room:
            return choice
    return choices[-1][: max(room - 2, 1)].rstrip(" ,") + ".."


def fit_end(width: float, *choices: str) -> str:
    """As `fit`, but what is cut goes from the front."""
    fitted, last = fit(width, *choices), choices[-1]
    return fitted if fitted in choices else ".." + last[-max(int(width / CHARACTER) - 2, 1) :]


def words(x: float, y: float, text: str, style: str = "") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{named}>{escape(text)}</text>'


def rectangle(x: float, y: float, width: float, height: float, style: str, radius: float = 0) -> str:
    rounded = f' rx="{number(radius)}"' if radius else ""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f'<rect class="{style}" {place}{rounded}/>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<path class="{style}" d="M{number(x1)} {number(y1)}L{number(x2)} {number(y2)}"/>'


def titled(title: str, *shapes: str) -> str:
    """The shapes, with what a pointer over them shows."""
    return f"<g><title>{escape(title)}</title>{''.join(shapes)}</g>"


def document(width: float, height: float, title: str, description: str, shapes: list[str], style: str = "") -> str:
    """A whole picture. `description` is for those who cannot see it; `style` adds rules, night ones included."""
    colours = "".join(f".d{index} {{ fill: {colour}; }}\n" for index, colour in enumerate(_LIGHT))
    night = "".join(f".d{index} {{ fill: {colour}; }}\n" for index, colour in enumerate(_DARK))
    size = f'width="{number(width)}" height="{number(height)}" viewBox="0 0 {number(width)} {number(height)}"'
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="name about">',
            f'<title id="name">{escape(title)}</title><desc id="about">{escape(description)}</desc>',
            f"<style>{_BOTH}{colours}@media (prefers-color-scheme: dark) {{{_NIGHT}{night}}}\n{style}</style>",
            rectangle(0, 0, width, height, "ground"),
            *shapes,
            "</svg>\n",
        )
    )
