"""Directory of the packages under test: the source tree, or where they are installed."""

from pathlib import Path

import collectives

SOURCES = Path(collectives.__file__).resolve().parents[1]
