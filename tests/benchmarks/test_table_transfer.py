"""Tables, sentences and plots of encoders by labels per class and on other classes, from made results."""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import table_transfer
from table_transfer import crossing, encoder_panels, gathered, label_panels, main, page

from metapretrain.evaluation.intervals import Interval, mean_interval
from metapretrain.report.results import pack

SUPERVISED, QUERY, SIMCLR = table_transfer.METHODS
HALF = 4.302652729911275 / math.sqrt(3)  # of the interval over three seeds, in standard deviations: t(2) at 97.5%
Result = dict[str, object]


def put(folder: Path, result: Mapping[str, object]) -> None:
    run = folder / f"{result['dataset']}-{result['recipe']}" / f"{result['method']}-s{result['seed']}"
    run.mkdir(parents=True)
    (run / "result.json").write_text(json.dumps({"schema": 1, "status": "complete", "kind": "row", **result}))


def labels(folder: Path, n: int, method: str, scores: Sequence[float], recipe: str = "paper", **more: object) -> None:
    """Runs of `run_stl10.py`, a score per seed."""
    for seed, score in enumerate(scores):
        result: Result = {"benchmark": "stl10", "dataset": f"stl10-{n}-labels", "recipe": recipe, "method": method}
        result |= {"seed": seed, "metrics": {"test_accuracy": score}, "counts": {"test": 8000}}
        put(folder, result | {"budget": {"encoder_passes": 449_920}} | more)


def encoders(folder: Path, shots: str, head: str, name: str, scores: Sequence[float], **more: object) -> None:
    """Runs of `run_fewshot.py`, one per encoder, whose seed ends its name."""
    for seed, score in enumerate(scores):
        result: Result = {"benchmark": "fewshot", "dataset": f"cifar-fs-{shots}", "recipe": "conv4-stl10-paper"}
        result |= {"method": f"encoder{head}-{name}-s{seed}", "seed": seed, "metrics": {"test_accuracy": score}}
        command = f"run_fewshot.py --encoder runs/stl10/stl10-450-labels-paper/{name}-s{seed}"
        put(folder, result | {"counts": {"test_episodes": 2000}, "command": command} | more)


def line_of(text: str, begin: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(begin))
    return line


def gap(mean: float, half: float) -> Interval:
    return Interval(mean, half, 3, 1.0, mean - half, mean + half)


def test_means_and_paired_differences_are_those_of_a_hand_calculation(tmp_path: Path) -> None:
    labels(tmp_path, 50, SUPERVISED, (0.60, 0.63, 0.66))
    labels(tmp_path, 50, QUERY, (0.70, 0.72, 0.74))
    labels(tmp_path, 50, SIMCLR, (0.61, 0.61, 0.70))
    text = page(gathered([tmp_path]))
    gaps = (1.0, -2.0, 4.0)  # points: mean 1, standard deviation 3
    cells = [f"63.00 ± {3 * HALF:.2f}", f"72.00 ± {2 * HALF:.2f}", "64.00 ± 12.91"]  # sqrt(27) HALF = 12.908
    cells += [f"+9.00 ± {1 * HALF:.2f}", f"+{sum(gaps) / 3:.2f} ± {3 * HALF:.2f}"]
    cells += [f"+8.00 ± {math.sqrt(13) * HALF:.2f}"]  # of 9, 11 and 4 points
    assert line_of(text, "| 50 |") == f"| 50 | {' | '.join(cells)} |"
    assert f"- `{QUERY}` against `{SUPERVISED}`: above at 50 labels.\n" in text
    assert f"- `{SIMCLR}` against `{SUPERVISED}`: no difference shown at 50 labels.\n" in text
    assert "- Encoder passes of a run, pretraining included: 449,920.\n" in text and "8,000 images per run" in text


@pytest.mark.parametrize(
    ("gaps", "told"),
    [
        ({10: gap(-5, 1), 25: gap(0.5, 2), 50: gap(3, 1)}, "The lines cross between 10 and 50 labels."),
        ({50: gap(3, 1), 10: gap(-5, 1)}, "The lines cross between 10 and 50 labels."),  # in any order
        (
            {10: gap(5, 1), 25: gap(-1, 0.5), 50: gap(3, 1)},
            "The lines cross between 10 and 25 and between 25 and 50 labels.",
        ),
        (
            {10: gap(-5, 1), 25: gap(1, 2)},
            "The means change order between 10 and 25 labels; the intervals show no cros",
        ),
        ({10: gap(-5, 1), 25: gap(-3, 1), 50: gap(3, 1)}, "The lines cross between 25 and 50 labels."),
        ({10: gap(5, 1), 25: gap(1, 2), 50: gap(4, 1)}, "The means keep their order."),
        ({10: mean_interval([1.0]), 25: mean_interval([-1.0])}, "The means change order between 10 and 25 labels; the"),
        ({10: gap(0, 1), 25: gap(0, 1)}, "The means are equal."),
        ({10: gap(5, 1)}, ""),
    ],
)
def test_a_crossing_is_told_where_the_intervals_show_one(gaps: dict[int, Interval], told: str) -> None:
    assert crossing(gaps).startswith(told) and bool(crossing(gaps)) == bool(told)


def test_the_sentence_of_made_runs_names_the_crossing(tmp_path: Path) -> None:
    for n, higher in ((10, -0.1), (25, 0.0), (100, 0.1)):
        labels(tmp_path, n, SUPERVISED, (0.50, 0.51, 0.52))
        labels(tmp_path, n, QUERY, (0.50 + higher, 0.512 + higher, 0.518 + higher))
    text = page(gathered([tmp_path]))
    told = (
        "above at 100 labels, below at 10 labels, no difference shown at 25 labels. The lines cross between 10 and 100"
    )
    assert f"- `{QUERY}` against `{SUPERVISED}`: {told} labels.\n" in text


def test_what_is_missing_is_named_and_pairs_are_of_common_seeds(tmp_path: Path) -> None:
    labels(tmp_path, 50, SUPERVISED, (0.60, 0.62, 0.64))
    labels(tmp_path, 50, QUERY, (0.70, 0.71))
    labels(tmp_path, 70, QUERY, (0.5,), budget={"encoder_passes": 100})
    (tmp_path / "stl10-50-labels-paper" / "simclr-s0").mkdir()
    (tmp_path / "stl10-50-labels-paper" / "simclr-s0" / "config.json").write_text("{}")
    (tmp_path / "stl10-50-labels-paper" / "simclr-s1").mkdir()
    (tmp_path / "stl10-50-labels-paper" / "simclr-s1" / "result.json").write_text("{")
    text = page(gathered([tmp_path]))
    half = 12.706204736432095 * 0.01 / math.sqrt(2) / math.sqrt(2)  # t(1); differences 0.10 and 0.09
    assert line_of(text, "| 50 |").endswith(f"| +9.50 ± {100 * half:.2f} (2 seeds) |")
    assert line_of(text, "| 10 |") == "| 10 | not run yet | not run yet | not run yet |"
    assert line_of(text, "| 70 |") == "| 70 | not run yet | 50.00 (1 seed) | not run yet |"
    missing = line_of(text, "Not run yet: ")
    assert "recipe strong: all" in missing and f"{QUERY} seed 2, {SIMCLR} at 50" in missing
    assert "all methods at 10, 25, 100, 250 and 450" in missing
    assert "- Encoder passes of a run, pretraining included: 449,920 at 50 labels, 100 at 70 labels.\n" in text
    assert "Incomplete runs, not in the tables: 1" in text and "Problems: 1" in text
    assert "Not run yet." in text.partition("## The encoders")[2]


def test_unequal_budgets_are_told(tmp_path: Path) -> None:
    labels(tmp_path, 50, SUPERVISED, (0.60, 0.62))
    labels(tmp_path, 50, QUERY, (0.70, 0.71), budget={"encoder_passes": 100})
    told = "- Budgets are not equal. Encoder passes of a run, pretraining included: 100 or 449,920."
    assert told in page(gathered([tmp_path])).splitlines()


@pytest.mark.parametrize("command", ["--encoder runs/stl10/stl10-450-labels-paper/NAME", "--encoder NAME"])
def test_encoders_are_rows_and_heads_columns(tmp_path: Path, command: str) -> None:
    labels(tmp_path, 10, "pretrain-simclr", (0.1,), kind="pretraining", budget={"encoder_passes": 77})
    labels(tmp_path, 450, "pretrain-simclr", (0.1,), kind="pretraining", budget={"encoder_passes": 359_936})
    for shots, more in (("5w1s", 0.0), ("5w5s", 0.2)):
        encoders(tmp_path, shots, "", SUPERVISED, (0.30 + more, 0.31 + more, 0.32 + more), command=command)
        encoders(tmp_path, shots, "", "pretrain-simclr", (0.28 + more, 0.28 + more, 0.31 + more), command=command)
        encoders(tmp_path, shots, "-logistic", SUPERVISED, (0.40 + more, 0.41 + more, 0.42 + more), command=command)
        encoders(
            tmp_path, shots, "-logistic", "pretrain-simclr", (0.50 + more, 0.51 + more, 0.52 + more), command=command
        )
    text = page(gathered([tmp_path])).partition("## The encoders")[2]
    assert line_of(text, "| recipe: encoder |") == (
        "| recipe: encoder | encoder passes | 1-shot nearest | 1-shot logistic | 5-shot nearest | 5-shot logistic |"
    )
    one, lower = f"{HALF:.2f}", f"{math.sqrt(3) * HALF:.2f}"  # standard deviations of 1 and sqrt(3) points
    assert line_of(text, "| paper: pretrain-simclr |") == (
        f"| paper: pretrain-simclr | 359,936 | 29.00 ± {lower} | 51.00 ± {one} | 49.00 ± {lower} | 71.00 ± {one} |"
    )
    (line,) = (line for line in text.splitlines() if line.startswith("| paper: pretrain-simclr minus"))
    gaps = [f"{mean} ± {half}" for mean, half in (("-2.00", one), ("+10.00", "0.00")) * 2]  # nearest: -2, -3 and -1
    assert line == f"| paper: pretrain-simclr minus supervised | {' | '.join(gaps)} |"
    told = "above at 1-shot logistic and 5-shot logistic, no difference shown at 1-shot nearest and 5-shot nearest."
    assert f"- `pretrain-simclr` against `{SUPERVISED}`: recipe paper, {told}\n" in text
    assert "2,000 episodes per run" in text and "all methods at 1-shot centred and 5-shot centred" in text


def test_encoders_by_prototypes_are_compared_with_those_by_simclr(tmp_path: Path) -> None:
    for name, scores in ((QUERY, (0.40, 0.42, 0.44)), (SIMCLR, (0.50, 0.51, 0.55)), ("pretrain-simclr", (0.6,))):
        encoders(tmp_path, "5w1s", "", name, scores)
    encoders(tmp_path, "5w1s", "", "pretrain-prl-query", (0.61,))
    text = page(gathered([tmp_path])).partition("## The encoders")[2]
    assert (
        line_of(text, f"| paper: {QUERY} minus") == f"| paper: {QUERY} minus {SIMCLR} | -10.00 ± {HALF:.2f} |"
    )  # of -10, -9 and -11
    assert line_of(text, "| paper: pretrain-prl-query minus") == (
        "| paper: pretrain-prl-query minus pretrain-simclr | +1.00 (1 seed) |"
    )
    assert f"- `{QUERY}` against `{SIMCLR}`: recipe paper, below at 1-shot nearest.\n" in text


def test_panels_show_means_with_their_intervals(tmp_path: Path) -> None:
    labels(tmp_path, 10, QUERY, (0.70, 0.72, 0.74), "strong")
    labels(tmp_path, 50, QUERY, (0.8,), "strong")
    encoders(tmp_path, "5w5s", "-centred", SIMCLR, (0.5, 0.5, 0.5))
    results = gathered([tmp_path]).results
    (panel,) = label_panels(results)
    assert panel.title == "stl10, recipe strong"
    assert panel.series == {
        QUERY: [(10, pytest.approx(72), pytest.approx(72 - 2 * HALF), pytest.approx(72 + 2 * HALF)), (50, 80, 80, 80)]
    }
    (other,) = encoder_panels(results)
    assert other.ticks == [SIMCLR] and [points[1:] for points in other.series["centred"]] == [(50, 50, 50)]


def test_the_command_writes_tables_plots_and_bundles_that_give_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    labels(runs, 10, SUPERVISED, (0.75, 0.75), correct=pack(np.arange(8000) % 4 > 0, "images"))
    encoders(runs, "5w1s", "", SIMCLR, (0.5, 0.6))
    assert main([str(runs), "--out", str(out), "--bundle", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {
        *("transfer.md", "labels.png", "encoders.png"),
        *("transfer-labels.json", "transfer-encoders.json"),
    }
    assert '"bits"' not in (out / "transfer-labels.json").read_text()
    first = (out / "transfer.md").read_text()
    assert first in capsys.readouterr().out
    files = [str(out / f"transfer-{name}.json") for name in ("labels", "encoders")]
    assert main([*files, "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "transfer.md").read_text() == first


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*folders: Path) -> str:
        assert main([*map(str, folders), "--out", str(tmp_path / "out")]) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.count("\n") == 1 and not (tmp_path / "out").exists()
        return told.err

    assert "no such folder" in refused(tmp_path / "none")
    labels(tmp_path / "all", 10, SUPERVISED, (0.5,), dataset="stl10")
    assert "no complete run of run_stl10.py --labels-per-class N" in refused(tmp_path / "all")
    labels(tmp_path / "untested", 10, SUPERVISED, (0.5,), metrics={"validation_accuracy": 0.5})
    assert "stl10-10-labels, paper: supervised-resnet18, seed 0 has no test_accuracy" in refused(tmp_path / "untested")
    labels(tmp_path / "first", 10, SUPERVISED, (0.5,))
    labels(tmp_path / "second", 10, SUPERVISED, (0.6,))
    assert "supervised-resnet18, seed 0 is there twice" in refused(tmp_path / "first", tmp_path / "second")
    labels(tmp_path / "half", 25, SUPERVISED, (0.6,), counts={"test": 4000})
    assert "was tested on 4,000 images, others on 8,000 images" in refused(tmp_path / "first", tmp_path / "half")
    encoders(tmp_path / "few", "5w1s", "", SIMCLR, (0.5,))
    encoders(tmp_path / "other", "5w5s", "", SIMCLR, (0.5,), counts={"test_episodes": 100})
    assert "was tested on 100 episodes, others on 2,000" in refused(tmp_path / "few", tmp_path / "other")
    encoders(
        tmp_path / "fewer", "5w5s", "", SIMCLR, (0.5,), command="--encoder runs/stl10/stl10-25-labels-paper/simclr-s0"
    )
    assert "encoders of 25 and 450 labels per class" in refused(tmp_path / "few", tmp_path / "fewer")
    labels(tmp_path / "number", 10, SUPERVISED, (0.5,), command=5)
    assert "0 other runs; " in (told := refused(tmp_path / "number")) and "'command' must be text" in told
    good = {
        "schema": 1,
        "status": "complete",
        "seed": 0,
        "metrics": {"test_accuracy": 0.5},
        "method": "encoder-nearest-simclr-s0",
    }
    (tmp_path / "bare.json").write_text(json.dumps([good, good | {"benchmark": "fewshot", "seed": 1}]))
    assert "in " + str(tmp_path / "bare.json") + "; 2 other runs" in refused(tmp_path / "bare.json")


def test_examples_are_right() -> None:
    tried = doctest.testmod(table_transfer)
    assert tried.attempted > 3 and not tried.failed
