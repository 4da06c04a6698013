"""The report of one run or a pair: its page, its tables, and the verdict on a pair."""

import base64
import gzip
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from fake_runs import folder, result
from hypothesis import given
from hypothesis import strategies as st

from octavo.experiments.compare_verdict import ONE_SEED, PredictedSpeed, verdict
from octavo.experiments.page import library
from octavo.experiments.run_report import summary_rows, write_report
from octavo.train.record.metrics import Losses, RunResult, RunSetup, read_metrics

FP8 = "fp8 rowwise"


@pytest.fixture
def pair(tmp_path):
    return [folder(tmp_path / "bf16"), folder(tmp_path / "fp8", FP8, shift=0.004)]


class References(HTMLParser):
    """Collects everything a browser would fetch, and whether all tags are closed in order."""

    VOID = frozenset({"meta", "link", "img", "br", "hr", "input"})

    def __init__(self):
        super().__init__()
        self.references = []
        self.open = []
        self.seen = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.references += [
            value or "" for name, value in attrs if name in ("src", "href", "data", "action", "srcset", "xlink:href")
        ]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(html):
    parser = References()
    parser.feed(html)
    assert parser.open == []
    return parser


def text_of(html):
    """The page's text, scripts and styles left out, entities resolved, white space collapsed."""
    from html import unescape

    without = re.sub(r"<(script|style)\b.*?</\1>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", without)).split())


def unpack(packed):
    return gzip.decompress(base64.b64decode(packed)).decode()


def charts_of(html):
    """What the page's script draws."""
    (packed,) = re.findall(r'<script type="text/plain" id="charts">(.*?)</script>', html)
    return json.loads(unpack(packed))


def test_the_page_holds_all_it_needs_and_fetches_nothing(pair, tmp_path):
    html = write_report(pair, tmp_path).read_text(encoding="utf-8")
    assert len(html) < 5_000_000
    assert parse(html).references == []
    (library,) = re.findall(r'<script type="text/plain" id="plotly">(.*?)</script>', html)
    assert "Plotly.react" in html and "plotly.js v" in unpack(library)[:200]
    assert "default-src 'none'" in html  # the browser refuses what is not on the page
    page = html.replace(library, "")
    for outside in ("http:", "https:", "//cdn", "@import", "<link", "url(", "fetch(", "XMLHttpRequest"):
        assert outside not in page
    titles = ["Loss", "Loss above BF16", "Tokens per second", "Gradient norm", "Learning rate"]
    assert [chart["title"] for chart in charts_of(html)] == titles
    assert html.count('class="plot"') == len(titles)


def test_a_missing_plotly_is_named_with_its_install_line(monkeypatch):
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match=r"plotly.*pip install 'octavo\[train\]'"):
        library()


def test_the_page_says_what_the_runs_measured(pair, tmp_path):
    text = text_of(write_report(pair, tmp_path).read_text(encoding="utf-8"))
    first, second = (RunResult.read(path) for path in pair)
    expected = verdict(first, second)
    assert expected.sentence in text
    assert all(note in text for note in expected.notes)
    for run in (first, second):
        assert f"{run.losses.tail_mean:.4f}" in text and f"{run.losses.final:.4f}" in text
        assert f"{run.tokens_per_s:,.0f}" in text
    assert "transformers" in text and "5.23.0" in text
    assert "precision.level bf16 fp8" in text  # what differs
    assert "hidden_size" in text  # the effective configuration
    assert all(part in text for part in second.converted.split("; "))


def test_layers_are_listed_with_their_reasons_and_blocks_merged(pair, tmp_path):
    rows = [(f"model.layers.{n}.mlp.{name}", "rowwise", "converted") for n in range(12) for name in ("up", "down")]
    rows[3] = ("model.layers.1.mlp.down", None, "named by skip")
    keys = ("name", "recipe", "reason")
    layers = [dict(zip(keys, row, strict=True)) | {"converted": row[1] is not None} for row in rows]
    (pair[1] / "layers.json").write_text(json.dumps(layers), encoding="utf-8")
    text = text_of(write_report(pair, tmp_path).read_text(encoding="utf-8"))
    assert "model.layers.*.mlp.up 12 FP8 rowwise converted" in text
    assert "model.layers.*.mlp.down 11 FP8 rowwise converted" in text
    assert "model.layers.*.mlp.down 1 high precision named by skip" in text


def test_a_config_difference_is_shown_and_equal_settings_are_not(tmp_path):
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", FP8, lr=1e-3)]
    text = text_of(write_report(runs, tmp_path).read_text(encoding="utf-8"))
    differing = text[text.index("What differs") : text.index("Every other setting")]
    assert "optim.lr 0.003 0.001" in differing
    assert "run.seed" not in differing and "run.name" not in differing and "run.out" not in differing


def test_names_from_outside_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    run = folder(tmp_path / "a", name=evil, converted=f"</script>{evil}")
    html = write_report([run], tmp_path).read_text(encoding="utf-8")
    assert evil not in html and "alert(1)&lt;/script&gt;" in html
    parse(html)


def test_the_charts_show_every_run_over_its_steps(pair, tmp_path):
    charts = charts_of(write_report(pair, tmp_path).read_text(encoding="utf-8"))
    series = [[trace["name"] for trace in chart["data"] if "hoverinfo" not in trace] for chart in charts]
    assert series == [["BF16", "FP8 rowwise"], ["FP8 rowwise"], *[["BF16", "FP8 rowwise"]] * 3]
    for path, raw in zip(pair, charts[0]["data"][::2], strict=True):
        rows = read_metrics(path)
        assert raw["x"] == [row.step for row in rows]
        assert raw["y"] == pytest.approx([row.loss for row in rows], rel=1e-5)


def test_the_tiles_of_a_pair_are_loss_memory_and_speed(pair, tmp_path):
    def tiles(prediction):
        html = write_report(pair, tmp_path, prediction).read_text(encoding="utf-8")
        return [text_of(tile) for tile in re.findall(r'<div class="tile">.*?</div>', html, flags=re.S)]

    measured = tiles(None)
    assert len(measured) == 4 and measured[0].endswith("mean of the last 10 % of steps")
    assert "0.70 ×" in measured[1] and "saved for backward" in measured[1]
    assert "0.34 ×" in measured[2] and "optimizer states" in measured[2]
    assert "tokens/s" in measured[3] and "predicted" not in measured[3]
    predicted = tiles(PredictedSpeed(gain=1.234, where="a model on 8 GPUs"))
    assert "1.23 ×" in predicted[3] and "predicted, not measured: a model on 8 GPUs" in predicted[3]


def test_a_single_run_has_a_report_without_a_verdict(pair):
    text = text_of(write_report(pair[:1], pair[0]).read_text(encoding="utf-8"))
    assert not (pair[0] / "verdict.json").exists()
    assert "Loss above" not in text and "What differs" not in text
    assert text.count("tokens/s, median") == 2  # tile and table


def test_a_run_that_was_stopped_says_where(tmp_path):
    run = folder(tmp_path / "a", "bf16", stopped="sigterm", steps=44)
    RunSetup(started=0.0, steps=400, summary=RunResult.read(run), data=None, expected=None).write(run)
    assert "stopped at step 44 of 400" in text_of(write_report([run], tmp_path / "r").read_text())


@pytest.mark.parametrize(("shift", "status"), [(0.004, "within"), (0.05, "above")])
def test_the_verdict_of_a_pair_is_beside_its_page(shift, status, tmp_path):
    parse(write_report([folder(tmp_path / "0"), folder(tmp_path / "1", FP8, shift=shift)], tmp_path).read_text())
    (pair,) = json.loads((tmp_path / "verdict.json").read_text(encoding="utf-8"))["verdicts"]
    assert (pair["baseline"], pair["candidate"], pair["status"]) == ("BF16", "FP8 rowwise", status)


def test_a_run_that_failed_at_its_first_step_still_has_a_report(tmp_path):
    broken = {"stopped": "non-finite", "losses": None, "tokens_per_s": None, "saved_bytes_per_token": None, "steps": 0}
    runs = [folder(tmp_path / "a"), folder(tmp_path / "b", FP8, **broken)]
    (runs[1] / "metrics.jsonl").write_text("", encoding="utf-8")
    text = text_of(write_report(runs, tmp_path).read_text(encoding="utf-8"))
    assert "No verdict: FP8 rowwise stopped after 0 steps" in text
    alone = write_report(runs[1:], runs[1])
    assert parse(alone.read_text(encoding="utf-8"))


def test_the_summary_table_has_a_difference_for_a_pair_only():
    pair = {label: values for label, *values in summary_rows([result(), result(FP8, tail=3.3)])}
    first, second, difference = pair["mean loss, last 10 % of steps"]
    assert (first, second) == ("3.0000", "3.3000") and "+0.3000" in difference and "+10.00 %" in difference
    assert pair["tokens/s, median"][2] == "0.40 ×" and pair["steps"][2] == ""
    assert all(len(row) == 2 for row in summary_rows([result()]))
    assert summary_rows([result(losses=None, tokens_per_s=None)])[0][1:] == ["–"]


@pytest.mark.thorough
def test_importing_the_report_imports_no_plotly_and_writing_one_no_graph_objects(pair, tmp_path):
    code = (
        "import sys, pathlib; from octavo.experiments.run_report import write_report\n"
        "assert 'plotly' not in sys.modules and 'jinja2' not in sys.modules\n"
        f"write_report([pathlib.Path(p) for p in {[str(path) for path in pair]!r}], pathlib.Path({str(tmp_path)!r}))\n"
        "assert 'plotly.graph_objs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


losses = st.floats(0.05, 20, allow_nan=False)


@given(a=losses, b=losses)
def test_swapping_the_arms_flips_the_gap_and_inverts_the_ratios(a, b):
    bf16, fp8 = result(tail=a), result(FP8, tail=b)
    there, back = verdict(bf16, fp8), verdict(fp8, bf16)
    assert there.tail_gap == -back.tail_gap == b - a
    assert there.final_gap == -back.final_gap
    assert there.tail_gap_percent * back.tail_gap_percent <= 0
    assert there.speed_ratio * back.speed_ratio == pytest.approx(1)
    assert there.memory_ratio * back.memory_ratio == pytest.approx(1)
    assert (there.baseline, there.candidate) == (back.candidate, back.baseline) == ("BF16", "FP8 rowwise")


@given(a=losses, b=losses)
def test_the_status_is_decided_by_the_gap_alone(a, b):
    pair_verdict = verdict(result(tail=a), result(FP8, tail=b))
    percent = 100 * (b - a) / a
    assert pair_verdict.tail_gap_percent == pytest.approx(percent)
    assert pair_verdict.status == ("within" if abs(percent) <= 1 else "above" if b > a else "below")
    assert f"{b:.4f} against {a:.4f}" in pair_verdict.sentence
    assert f"{percent:+.2f} %" in pair_verdict.sentence


@pytest.mark.parametrize(
    ("bf16", "fp8", "names", "status"),
    [(3.2, None, "FP8 rowwise", "above"), (None, 3.2, "BF16", "none"), (None, None, "BF16 and FP8 rowwise", "none")],
)
def test_a_held_out_loss_that_is_not_finite_is_named(bf16, fp8, names, status):
    """Whatever the loss in training; without a sentence it would read as if none had been measured."""
    pair_verdict = verdict(result(held_out={"loss": bf16}), result(FP8, held_out={"loss": fp8}))
    assert pair_verdict.held_out_sentence == f"The held-out loss of {names} is not finite at the end."
    assert (pair_verdict.held_out_status, pair_verdict.held_out_gap) == (status, None)


def test_the_held_out_loss_has_a_sentence_of_its_own():
    pair_verdict = verdict(result(tail=3.0, held_out={"loss": 3.2}), result(FP8, tail=3.0, held_out={"loss": 3.3}))
    assert (pair_verdict.status, pair_verdict.held_out_status) == ("within", "above")
    assert (
        "held-out loss is not within 1 % of BF16's at the end: it is higher, 3.3000" in pair_verdict.held_out_sentence
    )
    assert "3.0000 against 3.0000" in pair_verdict.sentence
    without = verdict(result(held_out={"loss": 3.2}), result(FP8, held_out={"accuracy": 0.5}))
    assert without.held_out_sentence == "" and without.held_out_gap is None


def test_few_steps_are_no_claim():
    pair_verdict = verdict(result(tail=3.0, steps=12), result(FP8, tail=3.001, steps=12))
    assert pair_verdict.status == "none" and pair_verdict.tail_gap == pytest.approx(0.001)
    assert pair_verdict.sentence.startswith("No verdict: 12 steps are too few, 100 are needed.")
    assert "+0.03 %" in pair_verdict.sentence
    assert "within" not in pair_verdict.sentence


def test_a_cpu_is_no_speed_claim_and_a_gpu_is_named():
    (on_cpu,) = [note for note in verdict(result(), result(FP8)).notes if "tokens/s" in note]
    assert "0.40 ×" in on_cpu and "emulates" in on_cpu and "nothing about the speed on a GPU" in on_cpu
    of_gpu = verdict(result(device="NVIDIA H200"), result(FP8, device="NVIDIA H200", tokens_per_s=1300.0)).notes
    (on_gpu,) = [note for note in of_gpu if "tokens/s" in note]
    assert "1.30 ×" in on_gpu and "NVIDIA H200" in on_gpu and "emulated" not in on_gpu


def test_memory_skipped_steps_and_the_single_seed_are_always_said():
    notes = verdict(result(), result(FP8, skipped_steps=3, saved_bytes_per_token=12_000.0)).notes
    assert any("1.20 × BF16's bytes" in note for note in notes)
    assert any("0.34 × BF16's memory: 4.1 against 12.0 bytes per parameter" in note for note in notes)
    assert any("skipped 3 of 100 steps" in note for note in notes)
    assert notes[-1] == ONE_SEED


def test_a_prediction_is_marked_as_one():
    prediction = PredictedSpeed(gain=1.234, where="a model on 8 GPUs")
    pair_verdict = verdict(result(), result(FP8), prediction)
    assert "Predicted, not measured: 1.23 × BF16's speed for a model on 8 GPUs." in pair_verdict.notes
    assert pair_verdict.to_json()["prediction"] == {"gain": 1.234, "where": "a model on 8 GPUs"}
    assert not any("Predicted" in note for note in verdict(result(), result(FP8)).notes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"stopped": "non-finite", "steps": 17}, "FP8 rowwise stopped after 17 steps"),
        ({"losses": None}, "FP8 rowwise has no step with a finite loss"),
        ({"steps": 90}, "BF16 trained for 100 steps and FP8 rowwise for 90"),
        ({"tokens": 1}, "BF16 trained for 25,600 tokens and FP8 rowwise for 1"),
        ({"losses": Losses(first=1.0, final=0.0, tail_mean=0.0)}, "FP8 rowwise's loss is 0"),
    ],
)
def test_runs_that_cannot_be_compared_get_no_verdict(changes, reason):
    for pair in ((result(), result(FP8, **changes)), (result(FP8, **changes), result())):
        pair_verdict = verdict(*pair)
        assert pair_verdict.status == "none" and pair_verdict.tail_gap is None
        assert pair_verdict.sentence.startswith("No verdict: ")
    assert reason in verdict(result(), result(FP8, **changes)).sentence
