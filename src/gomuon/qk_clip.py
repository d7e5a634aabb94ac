"""QK-clip: after a step, weights of queries and keys shrink until no head's logits were too large.

Algorithm 1 of the Kimi K2 report (arXiv 2507.20534), for any optimizer.
"""

import math
import re
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture.attention import AttentionWatch
from gomuon.capture.hooks import WrapperHook, unwrapped
from gomuon.distributed.ranks import Ranks, check_group, checksum
from gomuon.distributed.team_finder import is_distributed
from gomuon.errors import describe_value
from gomuon.parameters.attention_heads import ClippedAttention, Head, HeadClip, Rows
from gomuon.parameters.sharding import is_sharded

_UNSEEN = (
    "QK-clip saw no attention in the forward passes before this step, so no logit was clipped. It "
    "sees F.scaled_dot_product_attention and products of queries and keys that reach a softmax. It "
    "does not see into graphs of torch.compile, FlashAttention's own functions and flex_attention: "
    'in Transformers pass attn_implementation="sdpa", and compile parts of the model without '
    "attention, or train without QKClip"
)


class QKClip:
    """Clips attention logits by rescaling the weights of queries and keys after each step.

    If the largest logit S of a head in this step's forward passes is above the threshold τ, then
    γ = τ/S, and the head's rows of the query's and the key's weight and bias are multiplied by √γ:
    a logit of S becomes τ, beside what the step itself has changed. Where several query heads share
    a key head (grouped queries), or keys are not trained, the query's rows are multiplied by γ
    instead, so that no other head changes. Heads below τ stay as they are, bit for bit.

    It needs no names: which rows make a head is found in the first forward pass. Momentum, factors
    and maps are not touched, and nothing is saved with a checkpoint, because nothing lasts.

    Args:
        optimizer: the optimizer, one of this package's or any of torch's.
        model: the model, also wrapped in DistributedDataParallel, now or later.
        threshold: τ. 100 is Kimi K2's.
        process_group: the ranks whose maxima count together. None: those of
            DistributedDataParallel, or all ranks if the optimizer has work="shared" or
            "replicated".

    Raises:
        ValueError: the threshold is no positive number, the optimizer has no parameter of the
            model, or parameters are sharded. In forward passes: an attention cannot be rescaled.
        RuntimeError: at the end of the first step, if no attention was seen.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        threshold: float = 100.0,
        *,
        process_group: Any = None,
    ) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module):
            raise TypeError(
                "QKClip takes an optimizer and its model, got "
                f"{type(optimizer).__name__} and {type(model).__name__}"
            )
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise TypeError(f"threshold must be a number > 0, got {describe_value(threshold)}")
        if not 0 < threshold < math.inf:
            raise ValueError(f"threshold must be a finite number > 0, got {threshold}")
        check_group(process_group)
        self._model = inner = unwrapped(model)
        self.threshold = float(threshold)
        self._optimizer = optimizer
        self._names: dict[Tensor, str] = {p: name for name, p in inner.named_parameters()}
        self._by_name = {name: parameter for parameter, name in self._names.items()}
        held = {p for group in optimizer.param_groups for p in group["params"]}
        self._held = held & self._names.keys()
        self._check()
        self._process_group = process_group
        self._wrapper = WrapperHook()
        self._wrapper.watch(model)
        self._watch = AttentionWatch(self._names, self._held)
        self._watch.place(inner)
        self._handle = optimizer.register_step_post_hook(self._after_step)
        self._plan: HeadClip | None = None
        self._last: dict[str, Tensor] = {}
        self._has_warned = False

    def _check(self) -> None:
        if not self._held:
            raise ValueError(
                "the optimizer has no parameter of this model; give QKClip the model whose "
                "parameters it trains"
            )
        sharded = next((name for p, name in self._names.items() if is_sharded(p)), None)
        if sharded is not None:
            raise ValueError(
                f"QKClip cannot rescale sharded parameters, and {sharded!r} is one; use "
                "DistributedDataParallel, or train without QKClip"
            )

    def largest_logits(self) -> dict[str, Tensor]:
        """The largest logit of each head before the last clip, by the name of the query's weight.

        Of weights with several attentions, those of one after the other.
        """
        return dict(self._last)

    def remove(self) -> None:
        """Stop clipping: take all hooks off the model and the optimizer."""
        self._watch.remove()
        self._wrapper.remove()
        self._handle.remove()

    # ---- after a step ----------------------------------------------------------------------------

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check()  # the model may have been sharded since
        ranks = self._ranks()
        attentions = self._same_on_all(ranks)
        if not self._watch.seen and any(p.grad is not None for p in self._held):
            raise RuntimeError(_UNSEEN)
        self._warn_of_unseen(attentions)
        trained = [tuple(map(self._watch.trains, one.weights)) for one in attentions]
        if self._plan is None or self._plan.made_for != (attentions, trained):
            self._plan = HeadClip(attentions, trained)
        maxima = _maxima(attentions, ranks)
        self._last = {}
        for one, largest in zip(attentions, maxima, strict=True):
            name = self._names[one.weights[0]]
            before = [self._last[name]] if name in self._last else []
            self._last[name] = torch.cat([*before, largest])
            one.largest = None
        self._plan.clip(maxima, self.threshold)
        self._watch.undecided = False

    def _warn_of_unseen(self, attentions: list[ClippedAttention]) -> None:
        """Warn once of modules called attention of which nothing was seen, although others were."""
        if self._has_warned or self._watch.undecided:
            return
        self._has_warned = True
        seen = {weight for one in attentions for weight in one.weights}
        unseen = [
            name
            for name, module in self._model.named_modules()
            if re.search("attn|attention", type(module).__name__, re.IGNORECASE)
            and sum(self._moves(p) for p in module.parameters()) > 1
            and seen.isdisjoint(module.parameters())
        ]
        if unseen:
            warnings.warn(
                f"QK-clip saw no attention of {', '.join(map(repr, unseen))}, so its logits are "
                "not clipped; it does not see into compiled graphs and FlashAttention's functions",
                stacklevel=2,
            )

    def _moves(self, parameter: Tensor) -> bool:
        has_gradient = parameter.ndim > 1 and parameter.grad is not None
        return has_gradient and self._watch.trains(parameter)

    # ---- several ranks ---------------------------------------------------------------------------

    def _ranks(self) -> Ranks | None:
        """The ranks that train this model together; None if there is only this one."""
        works_together = self._optimizer.defaults.get("work") in ("shared", "replicated")
        group = self._process_group
        if group is None and not self._wrapper.found and not works_together:
            return None
        if not is_distributed():
            return None
        group = self._wrapper.process_group if group is None else group
        ranks = Ranks(group, next(iter(self._held)).device)
        return ranks if ranks.size > 1 else None

    def _same_on_all(self, ranks: Ranks | None) -> list[ClippedAttention]:
        """The known attentions, on every rank in the same order."""
        if ranks is not None:
            mine = sorted(map(self._described, self._watch.known.values()))
            if len({row[0] for row in ranks.gather([checksum(mine)])}) > 1:
                # An attention may have run on some ranks only.
                for theirs in ranks.gather_objects(mine):
                    for query, key in theirs:  # type: ignore[attr-defined]
                        self._watch.remember(self._restored(query), self._restored(key))
        return sorted(self._watch.known.values(), key=self._described)

    def _described(self, one: ClippedAttention) -> Any:
        return tuple(tuple(self._named(head) for head in heads) for heads in (one.query, one.key))

    def _named(self, head: Head) -> Any:
        bias = () if head.bias is None else (self._names[head.bias.parameter], head.bias.first)
        weight = self._names[head.weight.parameter], head.weight.first, head.weight.transposed
        return weight, bias, head.row, head.size

    def _restored(self, heads: Any) -> list[Head]:
        restored = []
        for (name, first, transposed), of_bias, row, size in heads:
            bias = Rows(self._by_name[of_bias[0]], of_bias[1]) if of_bias else None
            restored.append(Head(Rows(self._by_name[name], first, transposed), bias, row, size))
        return restored


def _maxima(attentions: list[ClippedAttention], ranks: Ranks | None) -> list[Tensor]:
    """[heads] of each attention: the largest logits on all ranks; -inf if it did not run."""
    largest = [one.maxima for one in attentions]
    if ranks is None or not largest:
        return largest
    together = torch.cat([values.double() for values in largest])
    ranks.largest_in_place(together)
    parts = together.split([len(values) for values in largest])
    return [part.to(own.dtype) for part, own in zip(parts, largest, strict=True)]
