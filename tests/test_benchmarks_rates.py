"""What the planner knows of an H100 is what its result files say."""

import json
import math

import pytest
from benchmarks import rates

from octavo.planner.devices import DEVICES, Gpu
from octavo.planner.roofline import product

H100 = DEVICES["h100"]


def test_the_committed_file_is_of_the_committed_results():
    assert rates.OUT.read_text(encoding="utf-8") == rates.text(), "run `python -m benchmarks rates`"
    assert len(H100.measured) == len(rates.content()["entries"]) == 27


def test_shares_give_back_the_rates_that_were_measured():
    shares = rates.content()["gpu"]
    assert {name: getattr(H100, name) for name in shares if name.endswith("_efficiency")} == {
        name: share for name, share in shares.items() if name.endswith("_efficiency")
    }
    seconds = product(H100, 8192, 8192, 8192)
    assert 2 * 8192**3 / seconds / 1e12 == pytest.approx(760, rel=0.03)  # measured there
    assert H100.bandwidth == pytest.approx(2.42e12, rel=0.002)


def test_another_result_is_another_share(tmp_path):
    for path in rates.FOLDER.glob("*.json"):
        content = json.loads(path.read_text())
        for row in content["rows"]:
            if row["arm"] == "bf16" and row.get("kernel_ms"):
                row["kernel_ms"] *= 2
        (tmp_path / path.name).write_text(json.dumps(content))
    before, after = rates.content()["gpu"], rates.content(tmp_path)["gpu"]
    assert after["bf16_efficiency"] == pytest.approx(before["bf16_efficiency"] / 2, abs=1e-3)
    same = [name for name in before if name.endswith("_efficiency") and name != "bf16_efficiency"]
    assert [before[name] for name in same] == [after[name] for name in same]
    assert all(math.isfinite(before[name]) for name in same) and isinstance(H100, Gpu)
