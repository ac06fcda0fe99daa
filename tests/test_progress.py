"""The progress bar: in a terminal, in a log, without tqdm."""

import io
import itertools
import sys

import pytest

from purescale._tree.hints import progress_bar


def test_a_bar_without_tqdm_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it was not installed
    with pytest.raises(ImportError, match=r"Fix: `pip install '\.\[progress\]'` in a copy of the"):
        progress_bar("run", "step")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_bar_in_a_log_is_a_line_a_minute(terminal, monkeypatch):
    tqdm = pytest.importorskip("tqdm.std")

    class Screen(io.StringIO):
        def isatty(self):
            return terminal

    clock = itertools.count()  # a second between any two looks at it
    monkeypatch.setattr(tqdm, "time", lambda: float(next(clock)))
    monkeypatch.setattr(sys, "stderr", Screen())
    with progress_bar("run", "step", 100) as bar:
        for _ in range(100):
            bar.update()
    lines = sys.stderr.getvalue().count("run")
    assert lines > 90 if terminal else 3 <= lines < 10
    assert "run: 100%" in sys.stderr.getvalue()
