"""Pages and tables that benchmarks write are those of the kept results."""

import json

import pytest
from benchmarks import compiled, rates, settings

from octavo.planner.devices import DEVICES
from octavo.planner.roofline import product

H100 = DEVICES["h100"]


def of_compiled(drop=0):
    return compiled.document(json.loads(compiled.RESULT.read_text())["rows"][drop:], compiled.DOCUMENT.read_text())


@pytest.mark.parametrize(
    ("path", "document", "command"),
    [
        (compiled.DOCUMENT, of_compiled, "compiled --write"),
        (rates.OUT, rates.text, "rates"),
        (settings.DOCUMENT, settings.document, "settings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_document_is_of_the_results(path, document, command):
    assert path.read_text(encoding="utf-8") == document(), f"run `python -m benchmarks {command}`"


def test_compiled_graphs_of_all_arms_are_kept():
    rows = json.loads(compiled.RESULT.read_text())["rows"]
    arms = {(arm, False) for arm in (*compiled.RECIPES, *compiled.STORED, "opaque blockwise")}
    assert {(row["arm"], row["combo_kernels"]) for row in rows} == arms | {(arm, True) for arm in compiled.COMBINED}
    assert of_compiled(drop=1) != compiled.DOCUMENT.read_text()


def test_shares_of_an_h100_give_back_the_rates_that_were_measured():
    shares = rates.content()["gpu"]
    assert {name: getattr(H100, name) for name in shares if name.endswith("_efficiency")} == {
        name: share for name, share in shares.items() if name.endswith("_efficiency")
    }
    seconds = product(H100, 8192, 8192, 8192)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(760, rel=0.03)  # measured there
    assert H100.bandwidth == pytest.approx(2.42e12, rel=0.002)
    assert len(H100.measured) == len(rates.content()["entries"]) == 27
