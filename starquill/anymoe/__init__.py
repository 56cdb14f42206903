"""AnyMoE: one mixture out of fine-tunes of one model, of which only the gates are trained."""

from __future__ import annotations

from starquill.anymoe.config import AnyMoeConfig, TrainProgress, TrainReport, read_layers
from starquill.anymoe.training import join, train

__all__ = ["AnyMoeConfig", "TrainProgress", "TrainReport", "join", "read_layers", "train"]
