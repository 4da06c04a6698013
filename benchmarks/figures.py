"""The images of README and docs/: Plotly figures in the theme of the reports, as SVG files that follow the reader's
light or dark scheme. Plotly draws in a browser, so saving one needs a Chromium; the same figure gives the same file.
"""

import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from benchmarks import browser
from benchmarks.environment import write_text
from benchmarks.session import Row
from octavo.experiments.charts import DARK, LIGHT, axis, colour, layout, plain

Figure = dict[str, Any]  # `data` and `layout` of plotly.js, with colours as CSS variables of the theme
WIDTH = 900  # Width of an image, in CSS pixels
TITLE = "font: 600 14px sans-serif; fill: var(--ink);"
OVERVIEW = {
    "convergence": "Measured: loss gap to bf16 in percent, each FP8 option alone and all of them, on three seeds",
    "predicted": "Predicted, not measured: speed-up over bf16 by size of the matrices, on four GPUs",
}
"""README's picture: images, and their titles in it."""
PAGE = """<!doctype html><meta charset="utf-8"><script>
let state = 1;
Math.random = () => (state = state * 16807 % 2147483647) / 2147483647;  // names of clip paths, the same each time
</script><script>{library}</script><body><script>
const figure = {figure};
Plotly.toImage(figure, {{format: "svg", width: {width}, height: figure.layout.height}})
  .then(image => {{ document.body.textContent = image; }});
</script>"""


def save(content: Figure, path: Path) -> None:
    """Replace an image in one step, or print why it stays as it is: no browser to draw it with."""
    if browser.find() is None:
        print(f"{path} is not drawn: no Chromium is installed ({browser.INSTALL}); its numbers are in the document")
        return
    write_text(path, draw(content))


def draw(content: Figure) -> str:
    from plotly.offline import get_plotlyjs

    text = json.dumps(content, allow_nan=False)
    used = sorted(set(re.findall(r"var\(--([\w-]+)\)", text)))
    fixed = re.sub(r"var\(--([\w-]+)\)", lambda match: LIGHT[match[1]], text)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "figure.html"
        shown = fixed.replace("<", "\\u003c")
        page.write_bytes(PAGE.format(library=get_plotlyjs(), figure=shown, width=WIDTH).encode())
        document, messages = browser.run(page)
    image = re.search(r"<body>data:image/svg\+xml,([^<]*)</body>", document)
    if image is None:
        raise RuntimeError(f"plotly.js drew no figure: {messages}")
    svg = unquote(image[1])
    for name in used:
        svg = svg.replace(_rgb(LIGHT[name]), f"var(--{name})")
    schemes = (" ".join(f"--{name}: {_rgb(scheme[name])};" for name in used) for scheme in (LIGHT, DARK))
    style = "<style>:root {{ {} }} @media (prefers-color-scheme: dark) {{ :root {{ {} }} }}</style>".format(*schemes)
    head = f"<desc>{digest(content)}</desc>{style}"
    return re.sub(r"<svg[^>]*>", lambda match: match[0] + head, svg, count=1) + "\n"


def digest(content: Figure) -> str:
    """Return what tells a figure from others, to six digits of each number; its image has it in `<desc>`."""
    text = re.sub(r"-?\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.6g}", json.dumps(content))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _rgb(value: str) -> str:
    """A colour of the theme without its opacity, as Plotly writes it."""
    channels = bytes.fromhex(value[1:]) if value.startswith("#") else map(int, re.findall(r"\d+", value)[:3])
    return "rgb({}, {}, {})".format(*channels)


def overview(folder: Path) -> str:
    parts, top = [], 0
    for name, title in OVERVIEW.items():
        svg = (folder / f"{name}.svg").read_text(encoding="utf-8")
        height = int(re.search(r'height="(\d+)"', svg)[1])  # type: ignore[index]
        text = f'<text x="16" y="{top + 26}" style="{TITLE}">{title}</text>'
        parts += [text, re.sub("<svg ", f'<svg y="{top + 38}" ', svg.strip(), count=1)]
        top += 38 + height
    size = f'width="{WIDTH}" height="{top}"'
    back = f'<rect {size} style="fill: var(--card);"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {top}">{back}{"".join(parts)}</svg>\n'


COLOURS = {
    "octavo rowwise": colour(0), "octavo tensorwise": colour(5), "torchao tensorwise": colour(1),
    "torchao rowwise": colour(4), "given tensorwise": "var(--soft)",
}  # fmt: skip
REFERENCE = {"type": "line", "line": {"color": "var(--soft)", "width": 1, "dash": "dash"}, "layer": "below"}


def speedups(rows: Sequence[Row]) -> Figure:
    timed = [row for row in rows if row.get("kernel_ms") and row["arm"] in COLOURS]
    base = {row["shape"]: row["kernel_ms"] for row in rows if row["arm"] == "bf16" and row["mode"] == "eager"}
    names = [shape for shape in dict.fromkeys(row["shape"] for row in timed) if shape in base]
    arms = list(dict.fromkeys((row["arm"], row["mode"]) for row in timed))
    data = []
    for index, (arm, mode) in enumerate(arms):
        of_arm = [row for row in timed if (row["arm"], row["mode"]) == (arm, mode) and row["shape"] in base]
        offset = (index - len(arms) / 2) / (1.4 * len(arms))
        marker = {"color": COLOURS[arm], "size": 8, "symbol": "circle" if mode == "eager" else "diamond"}
        data.append(
            {"type": "scatter", "mode": "markers", "marker": marker, "name": f"{arm}, {mode}",
             "x": [base[row["shape"]] / row["kernel_ms"] for row in of_arm],
             "y": [names.index(row["shape"]) + offset for row in of_arm]}
        )  # fmt: skip
    line = {**REFERENCE, "yref": "paper", "x0": 1, "x1": 1, "y0": 0, "y1": 1}
    places = {"tickvals": list(range(len(names))), "ticktext": [plain(name) for name in names]}
    settings = layout(
        150 + 42 * len(names), showlegend=len(data) > 1, shapes=[line],
        margin={"l": 64, "r": 24, "t": 64, "b": 56, "pad": 4},
        xaxis=axis(title="speed-up over bf16 eager, kernel time, forward + backward", ticksuffix=" ×"),
        yaxis=axis(**places, range=[len(names) - 0.5, -0.5]),
    )  # fmt: skip
    return {"data": data, "layout": settings}
