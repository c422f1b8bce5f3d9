"""Models by name, as :data:`MODELS` lists them, among them the paper's six.

>>> import torch
>>> with torch.device("meta"):
...     model = MODELS["vit"]()
>>> sum(param.numel() for param in model.parameters())
10949002
"""

from baoc.models.named import ALIASES, MODELS
from baoc.models.packages import ModelError
from baoc.models.vit import ViT

__all__ = ["ALIASES", "MODELS", "ModelError", "ViT"]
