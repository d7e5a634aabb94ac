"""Go-MUON with an image model of timm: python examples/image.py --model resnet18 --data FOLDER

FOLDER has train/ and val/, with a folder of images for each class. Without --data it learns
scikit-learn's digits, 8×8 images that come with the package: nothing is fetched.

    --pretrained    begin with timm's weights, which are fetched
    --resume        go on from the last epoch in --out, exactly
"""

import argparse
import math
import os
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gomuon import GoMuon


def make_optimizer(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The one place to change the optimizer. The rate and the decay are those you use for AdamW.

    BatchNorm's vectors, the biases and the classifier are AdamW's part; vectors do not decay.
    """
    return GoMuon(model, lr=options.lr, lr_scale="adamw", weight_decay=options.weight_decay)


def make_data(options: argparse.Namespace) -> tuple[Dataset, Dataset, int, int]:
    """Images to train on, images to validate, the number of channels and of classes."""
    if options.data:
        kinds = []
        for split, is_training in (("train", True), ("val", False)):
            transform = timm.data.create_transform(options.size, is_training=is_training)
            root = Path(options.data) / split
            kinds.append(timm.data.create_dataset("", root=str(root), transform=transform))
        return *kinds, 3, len(kinds[0].reader.class_to_idx)
    pixels, labels = (torch.from_numpy(x) for x in load_digits(return_X_y=True))
    images = (pixels.float().view(-1, 1, 8, 8) - 8) / 8
    images = F.interpolate(images, (options.size, options.size), mode="bilinear")
    train, val = train_test_split(range(len(labels)), test_size=0.2, random_state=0)
    splits = [TensorDataset(images[part], labels[part]) for part in (train, val)]
    return *splits, 1, 10


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of images that are classified correctly."""
    model.eval()
    hits = [(model(x.to(device)).argmax(1) == y.to(device)).float() for x, y in loader]
    model.train()
    return torch.cat(hits).mean().item()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="test_resnet", help="any name of timm.list_models()")
    parser.add_argument("--pretrained", action="store_true")
    parser.add_argument("--data", help="a folder with train/ and val/")
    parser.add_argument("--out", default="out-image", help="folder of checkpoint.pt")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lr", type=float, default=1e-3, help="as for AdamW")
    parser.add_argument("--weight_decay", type=float, default=0.05, help="as for AdamW")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=32, help="width and height of the images")
    parser.add_argument("--workers", type=int, default=0, help="processes that load images")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training, held_out, channels, classes = make_data(options)
    draw = torch.Generator()
    settings = {"batch_size": options.batch, "num_workers": options.workers}
    batches = DataLoader(training, shuffle=True, drop_last=True, generator=draw, **settings)
    validation = DataLoader(held_out, **settings)
    model = timm.create_model(
        options.model, pretrained=options.pretrained, in_chans=channels, num_classes=classes
    ).to(device)
    optimizer = make_optimizer(model, options)
    updates = options.epochs * len(batches)

    def rate_factor(step: int) -> float:
        """A cosine, after a linear warmup in the first tenth."""
        return min((step + 1) / (1 + updates // 10), (1 + math.cos(math.pi * step / updates)) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)

    first, out = 0, Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    if options.resume:
        saved = torch.load(out / "checkpoint.pt", map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]
    else:
        print(getattr(optimizer, "routing_table", str)())  # who updates what, and why

    for epoch in range(first, options.epochs):
        torch.manual_seed(epoch)  # dropout and augmentation: the same after a resume
        draw.manual_seed(epoch)  # the order of the images
        losses = []
        for images, labels in batches:
            loss = F.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        mean, accuracy = torch.stack(losses).mean().item(), validate(model, validation, device)
        print(f"epoch {epoch + 1}  loss {mean:.4f}  accuracy {accuracy:.4f}", flush=True)
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "epoch": epoch + 1}, out / "checkpoint.part")
        os.replace(out / "checkpoint.part", out / "checkpoint.pt")  # never half a file


if __name__ == "__main__":
    main()
