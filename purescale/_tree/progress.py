"""A progress bar for long loops of the library."""

from __future__ import annotations

from typing import Any


def progress_bar(desc: str, unit: str, total: int | None = None, *, disable: bool = False) -> Any:
    """Return tqdm's bar, with a line a minute where the output is not a terminal."""
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError(
            "progress=True needs tqdm. Fix: `pip install '.[progress]'` in a copy of the "
            "repository, or progress=False."
        ) from error
    bar = tqdm(desc=desc, unit=unit, total=total, disable=disable)
    if not bar.disable and not bar.gui and not bar.fp.isatty():
        bar.mininterval = 60.0  # seconds: in a log every refresh is a line
    return bar
