"""The contract tests share one module about the repository's source."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
