"""The version of PyTorch under which the tests run."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
