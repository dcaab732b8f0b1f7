"""What Muon's options may say, for every trainer; one whose options are read unrun repeats it. No torch here."""

from __future__ import annotations

import re
from typing import Literal

MUON = ("muon", "dist_muon")
"""Values of --optimizer; dist_muon divides state and work among data-parallel ranks, which some trainers always do."""
LAYER_WISE = "dist_muon"
LAYER = re.compile(r"\.\d+\.")
"""In the names of what belongs to one of several layers; embeddings, output layers and value heads have no number."""
Scale = Literal["spectral", "unit_rms_norm", "shape_scaling"]
Precision = Literal["medium", "high", "highest"]
MOMENTUM = (0, 1)
"""Smallest and largest."""
NUM_NS_STEPS = (1,)
