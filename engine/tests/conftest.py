"""Makes the helpers of this folder and the module _parts importable."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
