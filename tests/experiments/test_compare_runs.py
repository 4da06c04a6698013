"""`octavo compare`: arms and seeds as they are given, runs that are made, found or resumed, and what is refused."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from tiny_runs import At, Recorder, fail

from octavo.experiments import compare_runs as comparing
from octavo.experiments.compare_report import to_json
from octavo.experiments.compare_runs import compare, make_arms, parse_arm, parse_seeds
from octavo.experiments.progress_bars import ProgressBars
from octavo.train import ConfigError, RunResult, read_metrics
from support.command import octavo, refused

STEPS = 4
FILES = ("compare.json", "report.html")
ARMS = ("bf16", "rowwise:precision.level=fp8")


@pytest.fixture(scope="module")
def config(make_config, tmp_path_factory):
    """The file of a tiny run."""
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(make_config(run={"steps": STEPS, "seed": 3}).to_toml())
    return path


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A comparison of two arms on two seeds."""
    out = tmp_path_factory.mktemp("trained")
    compare(make_arms(config, [], ARMS, "2"), out)
    return out


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of it."""
    return shutil.copytree(trained, tmp_path / "finished")


def written(folder):
    """Every file with its content and time."""
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(Path(folder).rglob("*")) if p.is_file()}


def command(config, out, *arms, seeds=2):
    arms = [word for arm in arms or ARMS for word in ("--arm", arm)]
    return ["compare", config, "--seeds", seeds, "--out", out, *arms]


# --- what is given ---


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("bf16", ("bf16", ())), ("bf16:", ("bf16", ())),
        ("a-1.b+c_d: optim.lr=1e-3 ", ("a-1.b+c_d", ("optim.lr=1e-3",))),
        ("x:precision.level=fp8 precision.recipe=mxfp8", ("x", ("precision.level=fp8", "precision.recipe=mxfp8"))),
        ('x:precision.skip=["a b", "*.c"]  optim.lr = 1', ("x", ('precision.skip=["a b", "*.c"]', "optim.lr = 1"))),
        ("x:model.config.hidden_size=3", ("x", ("model.config.hidden_size=3",))),
    ],
)  # fmt: skip
def test_an_arm_is_a_name_and_settings(text, arm):
    assert parse_arm(text) == arm


@pytest.mark.parametrize(
    "text", ["", ":optim.lr=1", "precision.level=fp8", "a/b:optim.lr=1", "..", "-x", "a b:optim.lr=1"]
)
def test_what_is_no_arm_is_refused(text):
    with pytest.raises(ConfigError, match=r"write NAME:section\.key=value"):
        parse_arm(text)


def test_seeds_are_a_number_or_a_list():
    assert parse_seeds("3", 7) == (7, 8, 9)
    assert parse_seeds(" 5, 1,2", 7) == (5, 1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1", "two seeds or more.*One seed cannot tell an effect from chaos"),
        ("1,2,1", "seed 1 is given twice"),
        ("three", "a number of them, as 3, or a list, as 1,2,5; got 'three'"),
    ],
)
def test_what_are_no_seeds_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_seeds(text, 0)


def test_settings_after_the_file_are_for_all_arms_and_seeds_from_its_own_on(config):
    own = "optim.lr=0.25 optim.micro_batches=2 model.attention=eager"
    arms = make_arms(config, ["optim.lr=0.5"], ["a", f"b:{own}"], "2")
    assert [(arm.name, arm.configs[3].model.attention) for arm in arms] == [("a", "auto"), ("b", "eager")]
    assert all(list(arm.configs) == [3, 4] for arm in arms)
    assert [arm.configs[4].optim.lr for arm in arms] == [0.5, 0.25]
    assert [arm.configs[4].run.seed for arm in arms] == [4, 4]
    assert [arm.configs[4].run.name for arm in arms] == ["a-seed4", "b-seed4"]


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ([], "two arms or more, the baseline first, and there is none"),
        (["a", "b:optim.lr=1", "a"], "two arms are named 'a'"),
        (["a", "b:optim.warmpu=1"], "arm 'b': unknown key optim.warmpu.*'warmup'"),
        (["a", "b:precision.level=fp8 precision.recipe=rowise"], "arm 'b': .*rowise.*'rowwise'"),
        (["a", "b:optim.lr"], "arm 'b': .*write section.key=value"),
        (["a", "b:optim.batch=8"], r"arm 'b' sets optim.batch = 8 \(the others: 4\): arms share model"),
        (["a", "b:run.seed=9"], "arm 'b' sets run.seed = 9"),
        (["a:model.config.hidden_size=64", "b"], "arm 'a' sets model.config.hidden_size = 64"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(config, arms, words):
    with pytest.raises(ConfigError, match=words):
        make_arms(config, [], arms, "2")


# --- what is made of it ---


@pytest.mark.thorough
def test_a_comparison_from_the_command_line(config, tmp_path):
    """Runs of a seed start alike, everything is written, and the same command trains nothing anew."""
    out = tmp_path / "out"
    first = octavo(*command(config, out))
    read = json.loads((out / "compare.json").read_text())
    assert first.exit_code == read["exit_code"] == {"worse": 1, "inconclusive": 3}.get(read["arms"][1]["verdict"], 0)
    assert "rowwise-seed4 (4/4)  step 4/4" in first.stderr
    shown = " ".join(first.stdout.split())
    assert read["arms"][1]["sentence"] in shown and "report.html" in shown and "detectable" in shown
    folders = [out / f"{arm}-seed{seed}" for seed in (3, 4) for arm in ("bf16", "rowwise")]
    start = [read_metrics(folder)[0].loss for folder in folders]
    assert start[0] == pytest.approx(start[1], rel=0.01) and start[2] == pytest.approx(start[3], rel=0.01)
    assert start[0] != start[2]  # another seed
    for arm, name in zip(read["arms"], ("bf16", "rowwise"), strict=True):
        tails = {str(seed): RunResult.read(out / f"{name}-seed{seed}").losses.tail_mean for seed in (3, 4)}
        assert arm["losses"] == tails
    base, rowwise = (arm["losses"] for arm in read["arms"])
    whole = sum(base.values()) / 2
    assert read["arms"][1]["gaps_percent"]["3"] == pytest.approx(100 * (rowwise["3"] - base["3"]) / whole)
    before = {path: kept for folder in folders for path, kept in written(folder).items()}
    assert octavo(*command(config, out)).exit_code == first.exit_code
    assert before == {path: kept for folder in folders for path, kept in written(folder).items()}
    assert json.loads((out / "compare.json").read_text()) == read


@pytest.mark.thorough
def test_an_interrupted_comparison_goes_on(config, trained, tmp_path):
    """A run that died goes on from its checkpoint, those before it are kept, and the losses come out the same."""
    arms = make_arms(config, ["run.save_every=2"], ARMS, "2")
    out = tmp_path / "out"

    class Third(Recorder):
        """Fails at step 3 of the third run."""

        def start(self, config, first_step, setup):
            self.runs = getattr(self, "runs", 0) + 1

        def step(self, row):
            if self.runs == 3 and row.step == 3:
                fail()

    with pytest.raises(RuntimeError, match="killed"):
        compare(arms, out, progress=Third())
    assert not (out / "compare.json").exists()
    ended = written(out / "bf16-seed3") | written(out / "rowwise-seed3")
    progress = At(3, lambda: None)
    comparison = compare(arms, out, progress=progress)
    assert [row.step for row in progress.rows] == [3, 4, 1, 2, 3, 4]
    assert ended == written(out / "bf16-seed3") | written(out / "rowwise-seed3")
    whole = json.loads((trained / "compare.json").read_text())
    assert to_json(comparison)["arms"][1]["losses"] == whole["arms"][1]["losses"]


def test_sigterm_saves_and_says_how_to_go_on(config, tmp_path, monkeypatch):
    words = command(config, tmp_path / "my out")
    monkeypatch.setattr("sys.argv", ["octavo", *map(str, words)])
    seen = []

    def step(bars, row):
        seen.append(row.step)
        if len(seen) == STEPS + 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBars, "step", step)
        result = octavo(*words)
    assert result.exit_code == 4, result.output
    assert "Stopped and saved" in result.stdout and f"'{tmp_path / 'my out'}'" in result.stdout
    assert "octavo compare" in result.stdout
    assert not (tmp_path / "my out/compare.json").exists()
    assert RunResult.read(tmp_path / "my out/rowwise-seed3").stopped == "sigterm"
    assert octavo(*words).exit_code in (0, 1, 3)
    assert RunResult.read(tmp_path / "my out/rowwise-seed3").steps == STEPS


def test_a_run_that_diverges_is_a_result(config, tmp_path):
    arms = "a", "b:optim.lr=1e38 optim.clip=0"
    result = octavo(*command(config, tmp_path / "out", *arms))
    assert result.exit_code == 3, result.output
    assert "b failed (diverged, or ended above twice the baseline's loss) on seeds 3, 4." in " ".join(
        result.stdout.split()
    )
    assert "not finite" in result.stderr
    before = written(tmp_path / "out/b-seed3")
    assert octavo(*command(config, tmp_path / "out", *arms, seeds=3)).exit_code == 1
    assert written(tmp_path / "out/b-seed3") == before  # it has ended


def test_the_plan_stays_what_it_was(config, tmp_path):
    """It is that of the first report; another raises an error, and more seeds are marked."""
    result = octavo(*command(config, tmp_path / "out", "a", "b"), "--max-seeds", "2", "--json")
    read = json.loads(result.stdout)
    assert result.exit_code == 0 and read["planned_seeds"] == 2
    assert read["arms"][1]["gaps_percent"] == {"3": 0.0, "4": 0.0}  # the same arm twice, to the last digit
    more = command(config, tmp_path / "out", "a", "b", seeds=3)
    refused(octavo(*more, "--max-seeds", "3"), "was planned for at most 2 seeds", "Leave out --max-seeds 3")
    assert not (tmp_path / "out/a-seed5").exists()
    read = json.loads(octavo(*more, "--json").stdout)
    assert (read["planned_seeds"], read["extended"]) == (2, True)
    assert read == json.loads((tmp_path / "out/compare.json").read_text())


# --- losses of any trainer ---

GOOD = {"baseline": [3.0, 3.02, 2.98], "arms": {"fp8": [3.001, 3.0195, 2.9812]}}


def test_losses_of_a_file_are_judged(tmp_path):
    """A list of results, also of one object; NaN, null and "nan" have diverged; the worst exit code."""
    path = tmp_path / "losses.json"
    path.write_text(json.dumps(GOOD))
    result = octavo("compare", "--losses", path, "--json")
    (one,) = json.loads(result.stdout)
    assert result.exit_code == one["exit_code"] == 0 and one["arms"]["fp8"]["verdict"] == "indistinguishable"
    few = '{"baseline": [3.0, 3.02, 2.98], "arms": {"x": [3.0, NaN, 2.98], "y": [null, "nan", "NaN"], "z": [6, 9, 30]}}'
    path.write_text(f"[{json.dumps(GOOD)}, {few}]")
    result = octavo("compare", "--losses", path, "--json")
    _, many = json.loads(result.stdout)
    assert result.exit_code == many["exit_code"] == 1
    assert [arm["verdict"] for arm in many["arms"].values()] == ["inconclusive", "inconclusive", "worse"]
    assert many["arms"]["y"]["failed_seeds"] == [1, 2, 3]
    shown = octavo("compare", "--losses", path).stdout
    assert "z is worse than the baseline" in shown and "2 of 2" in shown
    path.write_text(json.dumps([GOOD, GOOD | {"arms": {"x": [3.0, None, 2.98]}}]))
    assert octavo("compare", "--losses", path).exit_code == 3
    path.write_text(json.dumps(GOOD))
    assert octavo("compare", "--losses", path, "--margin", "0.1").exit_code == 3
    read = json.loads(octavo("compare", "--losses", path, "--max-seeds", "2", "--json").stdout)
    assert read[0]["extended"] and read[0]["notes"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "cannot be read as JSON"), ("", "cannot be read as JSON"), ("[]", "at least 1 item"),
        ("[[]]", "an object"),
        ('{"arms": {"a": [3, 3]}}', "0.baseline: Field required"),
        ('{"baseline": [3, 3], "arms": {"a": [3, 3]}, "arm": 1}', "0.arm: Unexpected"),
        ('{"baseline": [3, 3], "arms": {}}', "got none"), ("[" * 100_000, "cannot be read as JSON"),
        ('{"baseline": [3, 3], "arms": {"a": [3, 3], "a": [3, 3]}}', "the key 'a' is given twice"),
        ('{"baseline": [3, 3], "arms": {"a": [3, "three"]}}', "0.arms.a.1: Input should be a valid number"),
        ('{"baseline": [3, 3], "arms": {"a": [3, true]}}', "0.arms.a.1: Input should be a valid number"),
        ('[{"baseline": [3, 3], "arms": {"a": [3, 3]}}, {"baseline": [3], "arms": {"a": [3]}}]', "object 2 of 2: a"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_judged_is_refused(tmp_path, text, message):
    (tmp_path / "losses.json").write_text(text)
    refused(octavo("compare", "--losses", tmp_path / "losses.json", "--json"), message, "losses.json")


def test_losses_and_runs_do_not_mix(config, tmp_path):
    (tmp_path / "losses.json").write_text(json.dumps(GOOD))
    refused(octavo("compare", config, "--losses", tmp_path / "losses.json"), "leave out CONFIG")
    refused(octavo("compare", "--losses", tmp_path / "losses.json", "--seeds", "3"), "leave out CONFIG")
    refused(octavo("compare", "--losses", tmp_path / "none.json"), "none.json")
    refused(octavo("compare"), "give CONFIG and two --arm, or --losses FILE")
    refused(octavo("compare", "--losses", tmp_path / "losses.json", "--max-seeds", "0"), "2 to 40 seeds; got 0")


@pytest.mark.thorough
def test_a_folder_of_something_else_is_left_as_it_is(config, finished, tmp_path):
    before = written(finished)
    other_lr = octavo(*command(config, finished), "optim.lr=0.5")
    refused(other_lr, "bf16-seed3 holds a run of another configuration", "optim.lr is 0.01 there, 0.5")
    other_level = octavo(*command(config, finished, "bf16", "rowwise:precision.level=fp8+activations"))
    refused(other_level, "rowwise-seed3", "precision.level is 'fp8' there, 'fp8+activations' here")
    assert written(finished) == before
    for name in ("report.html", "config.toml"):
        mine = tmp_path / name.partition(".")[0]
        mine.mkdir()
        (mine / name).write_text("mine")
        refused(octavo(*command(config, mine)), f"{mine} holds {name} but no compare.json")
        assert [path.name for path in mine.iterdir()] == [name]
    (tmp_path / "third/rowwise-seed4").mkdir(parents=True)
    (tmp_path / "third/rowwise-seed4/notes.txt").write_text("mine")
    refused(octavo(*command(config, tmp_path / "third")), "rowwise-seed4 has files but no config.toml")
    assert len(written(tmp_path / "third")) == 1
    refused(octavo(*command(config, config)), "is a file")


@pytest.mark.thorough
def test_seeds_and_arms_can_be_added(config, finished):
    before = written(finished / "rowwise-seed4")
    comparison = compare(make_arms(config, ["run.save_every=3"], [*ARMS, "again:optim.micro_batches=2"], "3"), finished)
    assert written(finished / "rowwise-seed4") == before
    assert comparison.seeds == (3, 4, 5) and [arm.name for arm in comparison.losses.arms] == ["rowwise", "again"]


@pytest.mark.thorough
def test_a_run_whose_steps_are_gone_is_named(config, finished):
    path = finished / "rowwise-seed3/metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match=r"rowwise-seed3/metrics\.jsonl ends at step 2, the run at step 4"):
        compare(make_arms(config, [], ARMS, "2"), finished)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arm", "a", "--arm", "b", "--seeds", f"1,{2**63}"], "run.seed"),
        (["--arm", "a"], "there is only 'a'"),
        (["--arm", "a", "--arm", "b", "--seeds", "1"], "two seeds or more"),
        (["--arm", "a", "--arm", "b", "--margin", "0"], "above 0 and below 100; got 0"),
        (["--arm", "a", "--arm", "b", "--confidence", "0.95"], "got 0.95 %"),
        (["--arm", "a", "--arm", "b", "optim.warmpu=1"], "'warmup'"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(config, tmp_path, monkeypatch, words, message):
    monkeypatch.setattr(comparing, "run", None)
    refused(octavo("compare", config, "--out", tmp_path / "out", *words), message)
    assert not (tmp_path / "out").exists()


def job(path, out):
    """One rank of a comparison: its exit code, the verdict, and the process groups that are left."""
    comparison = compare(make_arms(path, [], ARMS, "2"), Path(out))
    return comparison.exit_code, comparison.losses.arms[0].test.gaps


@pytest.mark.dist
@pytest.mark.slow
def test_two_processes_compare_as_one(gloo, config, tmp_path):
    """All ranks know the verdict, one writes; the losses are those of one process but for rounding."""
    (code, gaps), other = gloo.run(job, 2, str(config), str(tmp_path / "two"), timeout=240.0)
    assert other == (code, gaps)
    assert {path.name for path in (tmp_path / "two").iterdir() if path.is_file()} == set(FILES)
    alone = compare(make_arms(config, [], ARMS, "2"), tmp_path / "one")
    assert gaps == pytest.approx(alone.arms[0].losses.test.gaps, abs=0.5)
    results = [RunResult.read(tmp_path / f"{world}/rowwise-seed4") for world in ("one", "two")]
    assert [result.device for result in results] == ["cpu", "2 × cpu"]


@pytest.mark.thorough
@pytest.mark.dist
def test_a_mistake_is_told_to_all_processes(gloo, config, tmp_path):
    (tmp_path / "out/bf16-seed4").mkdir(parents=True)
    (tmp_path / "out/bf16-seed4/notes.txt").write_text("mine")
    messages = gloo.run(message_of_rank, 2, str(config), str(tmp_path / "out"))
    assert len(set(messages)) == 1 and "has files but no config.toml" in messages[0]


def message_of_rank(path, out):
    """The error message on a rank."""
    with pytest.raises(ConfigError) as caught:
        job(path, out)
    return str(caught.value)
