"""A loss with labels drawn from the model: its backward pass gives the true Fisher factor."""

import torch
from torch import Tensor
from torch.nn import functional as F


def sampled_label_loss(
    logits: Tensor, reduction: str, generator: torch.Generator | None = None
) -> Tensor:
    """Cross-entropy with labels y ~ softmax(logits), so that E[δδᵀ] is B_F (Proposition 3).

    Args:
        logits: [..., classes], attached to the graph of the forward pass.
        reduction: "mean" or "sum"; the same as for the training loss.
        generator: the random generator for the labels; None is torch's default one.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    p = rows.detach().float().softmax(-1)
    labels = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    return F.cross_entropy(rows, labels, reduction=reduction)
