"""torchvision, which timm and transformers import, beside a torch that it was not built for."""

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    # Its compiled operators do not load, as those of a CUDA build beside a CPU build of torch do
    # not. It registers fake kernels of these two while it is imported; no model here calls them.
    operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
