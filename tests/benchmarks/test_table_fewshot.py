"""The table of docs/fewshot.md is filled from finished runs."""

import json
from pathlib import Path

from table_fewshot import main


def test_cells_are_means_over_seeds_and_the_rest_stays(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.70, 0.72, 0.74)):
        folder = tmp_path / "fewshot" / "cifar-fs-5w1s-resnet12" / f"supervised-centroid-s{seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"metrics": {"test_accuracy": accuracy}}))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n")
    assert main([str(tmp_path), str(page)]) == 0
    written = page.read_text()
    assert written.startswith("before\n") and written.endswith("after\n") and "old" not in written
    assert "| `supervised-centroid` | 72.0 ± 5.0 |  | not run yet |  |" in written
    assert written.count("supervised-centroid") == 1 and "| `r2d2` | not run yet | 72.6 |" in written
