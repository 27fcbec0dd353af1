"""Hand-made folders of runs, as the tests of reports have them."""

from tests.report.conftest import MakeRun, make_run

__all__ = ["MakeRun", "make_run"]
