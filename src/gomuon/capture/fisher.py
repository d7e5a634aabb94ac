"""The loss whose backward pass gives the model's own Fisher factor."""

import torch
from torch import Tensor
from torch.nn import functional as F


def sampled_label_loss(
    logits: Tensor, reduction: str, generator: torch.Generator | None = None
) -> Tensor:
    """Cross-entropy with labels y ~ softmax(logits), so that E[δδᵀ] is B_F (Proposition 3).

    Args:
        logits: [..., classes], attached to the graph of the forward pass.
        reduction: "mean" or "sum", as the training loss.
        generator: where the labels are drawn from.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    p = rows.detach().float().softmax(-1)
    labels = torch.multinomial(p, 1, generator=generator).squeeze(-1)
    return F.cross_entropy(rows, labels, reduction=reduction)
