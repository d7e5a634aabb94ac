"""Image classifiers of timm and torchvision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.architectures.case import images, like, package

CLASSES = torch.tensor([0, 1, 2, 1])
TIMM_VIT: dict[str, Any] = {
    "img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5
}  # fmt: skip


def classes(model: Any) -> Tensor:
    return F.cross_entropy(model(like(model, images())), CLASSES)


def classes_of_larger(model: Any) -> Tensor:
    return F.cross_entropy(model(like(model, images(32))), CLASSES)


def of_timm(module: str, kind: str, **sizes: Any) -> nn.Module:
    package("timm")
    model: nn.Module = getattr(package(f"timm.models.{module}"), kind)(**sizes)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and not parameter.any():  # zeros let no gradient pass
            nn.init.uniform_(parameter, 0.5, 1.0)
    return model


def timm_vit() -> nn.Module:
    return of_timm("vision_transformer", "VisionTransformer", **TIMM_VIT)


def timm_beit() -> nn.Module:
    """Its attention adds biases of its own to `F.linear(x, self.qkv.weight)`."""
    return of_timm("beit", "Beit", **TIMM_VIT, init_values=0.1)


def timm_swin_v2() -> nn.Module:
    sizes = {"img_size": 32, "patch_size": 4, "embed_dim": 16, "window_size": 4, "num_classes": 5}
    return of_timm(
        "swin_transformer_v2", "SwinTransformerV2", depths=(2, 1), num_heads=(2, 4), **sizes
    )


def timm_convnext() -> nn.Module:
    return of_timm("convnext", "ConvNeXt", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), num_classes=5)


def timm_resnet() -> nn.Module:
    """Bottlenecks: 1×1, 3×3 and 1×1 convolutions."""
    block = package("timm.models.resnet").Bottleneck
    sizes = {"layers": (1, 1, 1, 1), "channels": (4, 8, 8, 12), "stem_width": 8, "num_classes": 5}
    return of_timm("resnet", "ResNet", block=block, **sizes)


def timm_mixer() -> nn.Module:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_blocks": 2, "num_classes": 5}
    return of_timm("mlp_mixer", "MlpMixer", **sizes)


def timm_efficientnet() -> nn.Module:
    """Depthwise convolutions, and squeeze and excitation by 1×1 convolutions."""
    model: nn.Module = package("timm").create_model("test_efficientnet", num_classes=5)
    return model


def torchvision_resnet18() -> nn.Module:
    """torchvision's layers and names, at an eighth of the width, which it has no setting for."""
    model: nn.Module = package("torchvision.models").resnet18(num_classes=5)
    for prefix, module in list(model.named_modules()):
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.Linear)):
            parent, _, own = prefix.rpartition(".")
            setattr(model.get_submodule(parent), own, narrow(module))
    return model


def narrow(module: nn.Conv2d | nn.BatchNorm2d | nn.Linear) -> nn.Module:
    """A layer of the same kind with an eighth of the channels."""
    if isinstance(module, nn.BatchNorm2d):
        return nn.BatchNorm2d(module.num_features // 8)
    if isinstance(module, nn.Linear):
        return nn.Linear(module.in_features // 8, module.out_features)
    inputs = module.in_channels if module.in_channels == 3 else module.in_channels // 8
    kernel, stride, padding = module.kernel_size[0], module.stride[0], module.padding[0]
    return nn.Conv2d(inputs, module.out_channels // 8, kernel, stride, int(padding), bias=False)
