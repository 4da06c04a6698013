"""Templates filled into pages. A report is one file and fetches nothing: plotly.js, 4.8 MB, and the charts lie on it
compressed, and its script unpacks them with the browser's own `DecompressionStream`.
"""

import base64
import gzip
import json
import platform
from datetime import UTC, datetime
from functools import cache
from importlib import resources

from octavo._version import __version__
from octavo.experiments.charts import DARK, FONT, LIGHT, Chart, css_variables
from octavo.runtime.extras import needs_extras


def render(template: str, **context: object) -> str:
    with needs_extras("a report"):
        from jinja2 import Environment, PackageLoader, StrictUndefined
    environment = Environment(
        loader=PackageLoader("octavo.experiments"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    placed: list[Chart] = []  # in the order of their places; the template adds each as it makes the place
    return environment.get_template(template).render(
        **context, placed=placed, library=library, script=script, light=css_variables(LIGHT), dark=css_variables(DARK),
        font=FONT, version=__version__,
        pack_charts=lambda: pack(json.dumps([chart.json for chart in placed], allow_nan=False)),
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {platform.system()} {platform.machine()}",
    )  # fmt: skip


def plotly_js() -> str:
    with needs_extras("a report"):
        from plotly.offline import get_plotlyjs
    return str(get_plotlyjs())


@cache
def library() -> str:
    return pack(plotly_js())


def script(page: str) -> str:
    """The script of a kind of page, which draws its charts: "report" or "live"."""
    templates = resources.files("octavo.experiments").joinpath("templates")
    return "".join(templates.joinpath(name).read_text(encoding="utf-8") for name in ("charts.js", f"{page}.js"))


def pack(text: str) -> str:
    """A text compressed, in characters that HTML leaves alone; `unpack` of the page's script reads it."""
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
