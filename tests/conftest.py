"""Makes tests/ranks.py importable, for the tests and for the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
