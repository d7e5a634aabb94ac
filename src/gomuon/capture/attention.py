"""Watches attention: the largest logit of every head, and which weights made its queries and keys.

While a model runs forward with gradients, a function mode of torch sees every call. It notes recent
products with weights (`projections.py`), and attention: calls of `scaled_dot_product_attention`,
and products of two activations that reach a softmax (`attention_scores.py`).
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gomuon.capture.attention_scores import SOFTMAX, Scores, followed, scores_of
from gomuon.capture.forward_mode import CallMode, ForwardHooks, push_mode, remove_mode
from gomuon.capture.hooks import is_exported
from gomuon.capture.projections import Projection, Undecided, heads_of, projection_of
from gomuon.functional.attention_logits import largest_logits
from gomuon.parameters.attention_heads import ClippedAttention, Head

_SDPA = F.scaled_dot_product_attention
_RECENT = 16  # products that may lie between a query's projection and its attention


class _Running(threading.local):
    """What runs in this thread."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.recent: deque[Projection] = deque(maxlen=_RECENT)
        self.scores: dict[int, tuple[Tensor, Scores]] = {}  # by id; the tensor is kept alive


class AttentionWatch:
    """Watches the attention of a model.

    Args:
        names: the names of the model's parameters.
        held: the parameters of the optimizer. They may be rescaled while they are trained.
    """

    def __init__(self, names: Mapping[Tensor, str], held: set[Tensor]) -> None:
        self.open = True
        self.seen = False  # whether any attention ran with gradients
        self.undecided = False  # whether the weights of one could not be told in this step
        self.known: dict[tuple[Head, ...], ClippedAttention] = {}
        self._names = {id(parameter): name for parameter, name in names.items()}
        self._held = held
        self._mode = CallMode(self.called)
        self._running = _Running()
        self._hooks = ForwardHooks(self)

    def place(self, model: nn.Module) -> None:
        """Hook every module with matrices, or with modules that have some."""
        self._hooks.place(m for m in model.modules() if any(p.ndim > 1 for p in m.parameters()))

    def remove(self) -> None:
        """Take the hooks off the model."""
        self._hooks.remove()
        self.open = False

    def enter(self, module: nn.Module) -> None:
        """Before a module's forward pass: enter the mode, unless a module around it has."""
        running = self._running
        if is_exported() or not (running.modules or torch.is_grad_enabled()):
            return
        if not running.modules:
            push_mode(self._mode)
        running.modules.append(module)

    def leave(self, module: nn.Module) -> None:
        """After a module's forward pass, also one that raised."""
        running = self._running
        if running.modules and running.modules[-1] is module:
            running.modules.pop()
            if not running.modules:
                self.close()

    @property
    def is_inside(self) -> bool:
        return bool(self._running.modules)

    def close(self) -> None:
        """Leave the mode, if a forward pass was interrupted."""
        self._running.modules.clear()
        self._running.recent.clear()
        self._running.scores.clear()
        remove_mode(self._mode)

    # ---- functions -------------------------------------------------------------------------------

    def called(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function of torch, and note what it has done."""
        made = func(*args, **kwargs)
        self._note(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        running = self._running
        if not self.is_inside or torch._C._are_functorch_transforms_active():
            return
        if func is _SDPA:
            self._attention_called(*args, **kwargs)
            return
        if not isinstance(made, Tensor):
            return
        projection = projection_of(func, args, kwargs, made, self._names)
        if projection is not None:
            running.recent.append(projection)
            return
        if running.scores:
            before = [running.scores.get(id(arg)) for arg in (*args, *kwargs.values())]
            found = next((entry[1] for entry in before if entry is not None), None)
            if found is not None and func in SOFTMAX:
                self._softmax_called(found, args[0] if args else kwargs["input"])
                return
            if found is not None and (scores := followed(found, func, args, made)) is not None:
                running.scores[id(made)] = made, scores
                return
        if (scores := scores_of(func, args, kwargs, made)) is not None:
            running.scores[id(made)] = made, scores

    def _attention_called(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        if not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
            return
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        scores = Scores(query.detach(), key.detach(), factor)
        self._observe(
            scores, None if attn_mask is None else attn_mask.detach(), is_causal=is_causal
        )

    def _softmax_called(self, scores: Scores, logits: Tensor) -> None:
        self._running.scores.clear()
        if torch.is_grad_enabled():
            shape = *scores.query.shape[:-1], scores.key.shape[-2]
            self._observe(scores, logits.detach().reshape(shape), is_causal=False)

    # ---- attention -------------------------------------------------------------------------------

    @torch.no_grad()
    def _observe(self, scores: Scores, mask: Tensor | None, *, is_causal: bool) -> None:
        """Note the largest logits of an attention; find its weights if they are not known."""
        self.seen = True
        query, key = scores.query, scores.key
        try:
            attention = self._recently_used(query) or self._found(query, key)
        except Undecided:
            self.undecided = True
            return
        if attention is None:
            return
        if scores.lost:
            raise ValueError(
                "QK-clip cannot follow the logits of the attention of "
                f"{self._names[id(attention.weights[0])]!r}: {scores.lost!r} changes them before "
                "the softmax. Where a tanh caps them, as in Gemma 2, they are bounded already: "
                "train without QKClip. Otherwise use F.scaled_dot_product_attention"
            )
        heads = len(attention.query)
        if query.ndim == 3:  # examples and heads are one dimension
            query, key = (states.unflatten(0, (-1, heads)) for states in (query, key))
            if mask is not None and mask.ndim == 3 and len(mask) > 1:
                mask = mask.unflatten(0, (-1, heads))
        factor = scores.factor
        attention.observe(largest_logits(query, key, factor, mask, is_causal=is_causal))

    def _recently_used(self, query: Tensor) -> ClippedAttention | None:
        """The known attention whose projections have just run, if there is only one."""
        recent = [id(projection.weight.parameter) for projection in self._running.recent]
        used, d = set(recent), query.shape[-1]
        fitting = [x for x in self.known.values() if x.ends <= used and x.query[0].size == d]
        if len(fitting) != 1:
            return None
        self._used(max(n for n, one in enumerate(recent) if one in fitting[0].ends))
        return fitting[0]

    def _found(self, query: Tensor, key: Tensor) -> ClippedAttention | None:
        """The attention that made these queries and keys; None if its weights are not trained."""
        recent = list(self._running.recent)
        of_query, of_key = heads_of(query, recent), heads_of(key, recent)
        if of_query is None or of_key is None:
            if recent and not any(self.trains(one.weight.parameter) for one in recent):
                return None
            which = "queries" if of_query is None else "keys"
            raise ValueError(
                f"QK-clip cannot rescale an attention near {self._recent_names()}: its {which} are "
                "not the outputs of one linear layer up to a rotation. If they are normalised "
                "after their projection, as in Qwen3, rescaling weights would change no logit, and "
                "QK-clip is not needed: train without QKClip. Neither can it rescale layers with "
                "adapters, several projections that are joined (as in DeepSeek's attention), keys "
                "from a cache, and layers in graphs of torch.compile"
            )
        self._used(max(of_query[0], of_key[0]))
        heads, keys = of_query[1], of_key[1]
        keys = [head for head in keys for _ in range(len(heads) // len(keys))]
        for number in (of_query[0], of_key[0]):
            if not recent[number].knows_bias:
                name = self._names[id(recent[number].weight.parameter)]
                raise ValueError(
                    f"QK-clip cannot rescale {name!r}: the bias of its layer is computed, and is "
                    "no parameter; train without QKClip"
                )
        if not any(self.trains(head.weight.parameter) for head in (heads[0], keys[0])):
            return None  # not remembered: what an adapter adds to frozen layers may still be zero
        return self.remember(heads, keys)

    def trains(self, parameter: Tensor) -> bool:
        """Whether the optimizer trains a parameter at present."""
        return parameter.requires_grad and parameter in self._held

    def remember(self, query: list[Head], key: list[Head]) -> ClippedAttention:
        """The attention with these heads."""
        return self.known.setdefault((*query, *key), ClippedAttention(query, key))

    def _used(self, number: int) -> None:
        """Forget the recent products up to one that an attention has used."""
        for _ in range(number + 1):
            self._running.recent.popleft()

    def _recent_names(self) -> str:
        found = [self._names[id(one.weight.parameter)] for one in self._running.recent]
        return ", ".join(map(repr, found[-4:])) or "no linear layer"
