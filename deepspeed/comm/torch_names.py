"""The few names of torch.distributed that depend on the version of torch; everybody else takes them from here.

Torch 2.13 renames the two flat collectives and warns at each use of the old names; older releases know only those.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist

all_gather_flat: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor
