"""Hooks on a model: placed, gated before each forward pass, told what they should know, removed."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gomuon.capture import Statistics
from gomuon.fisher import sampled_label_loss
from gomuon.groups import is_matrix, layer_specs, watched_modules
from gomuon.hooks import remove_inert_hooks
from gomuon.layers import PLAIN, LayerSpec, staggered
from gomuon.persistence import PersistentOptimizer
from gomuon.readers import Sampling
from gomuon.routing import unwrapped


class WatchingOptimizer(PersistentOptimizer):
    """An optimizer that sees what its model's layers see, on the steps its geometry asks for."""

    _specs: dict[Tensor, LayerSpec]
    _lags: dict[Tensor, float]
    _scaler: torch.amp.GradScaler | None

    def _local_statistics(self, index: int, ranks: int) -> dict[Tensor, Statistics]:
        """What this rank captured for a group in this step."""
        scale = 1.0 if self._scaler is None else self._scaler.get_scale()
        return self._captures[index].collect(scale, ranks)

    def _gate(self) -> None:
        """Open the hooks if the coming step refreshes; before its forward pass, so here."""
        for index, (group, capture) in enumerate(
            zip(self.param_groups, self._captures, strict=True)
        ):
            if self._model is not None and capture.settings != self._hook_settings(group):
                self._hook_group(index)  # by a checkpoint, or by hand
            capture.gate(partial(self.recipe.geometry.capture_due, group))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and the statistics that came with them."""
        super().zero_grad(set_to_none)
        for capture in self._captures:
            capture.forget_sums()

    def sample_labels(self, logits: Tensor, generator: torch.Generator | None = None) -> None:
        """True-Fisher backward factors: labels drawn from the model instead of the observed ones.

        Call it between the forward pass and `loss.backward()`. On refresh steps it costs one
        backward pass that stops at the activations; on other steps it returns at once.
        """
        if any(capture.window.open for capture in self._captures):
            loss = sampled_label_loss(logits, self.defaults["loss_reduction"], generator)
            for capture in self._captures:
                capture.use_gradients_of(loss)

    @contextmanager
    def statistics_mask(self, mask: Tensor) -> Iterator[None]:
        """Leave positions where `mask` [batch, positions] is zero out of the statistics.

        For forward passes inside the context, and layers with one row for each entry of the mask.
        Reentrant checkpointing repeats them in the backward pass, with the mask that came last.
        """
        if any(group.get("reduce") for group in self.param_groups):
            raise ValueError("a mask does not go with reduce=True, which averages over positions")
        with ExitStack() as masks:
            for capture in self._captures:
                masks.enter_context(capture.window.masked(mask))
            yield

    def use_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Tell of the GradScaler, whose scale the captured gradients carry.

        Without it all is well while the scale stays; when it changes, B̄ weighs old and new
        statistics by their scales.
        """
        self._scaler = scaler

    def attach(self, model: nn.Module) -> None:
        """Place the capturing hooks on `model`, whose parameters this optimizer holds.

        The constructor does so when it is given a model. Needed again after unpickling.
        """
        self.remove_hooks()
        self._model = model = unwrapped(model)
        remove_inert_hooks(model)
        self._specs = self._layer_specs(model)
        for index in range(len(self.param_groups)):
            self._hook_group(index)
        self._gate()

    def remove_hooks(self) -> None:
        """Take every hook off the model; the geometry then stays as it is."""
        for capture in self._captures:
            capture.remove()
        self._model = None

    def _layer_specs(self, model: nn.Module) -> dict[Tensor, LayerSpec]:
        """How parameters are cut into matrices: by module, then as `specs` says."""
        held = {p for group in self.param_groups for p in group["params"] if is_matrix(group, p)}
        biases = held if self.recipe.joins_bias else set()
        captured = any(self.recipe.geometry.captured_sides(self.defaults))
        return layer_specs(model, biases, self._spec_patterns, captured=captured)

    def _hook_settings(self, group: Mapping[str, Any]) -> tuple[Any, ...]:
        """What of a group's settings its hooks depend on."""
        names = ("token_stride", "token_skip", "reduce", "stagger")
        sides = self.recipe.geometry.captured_sides(group)
        return (*sides, *(group.get(name) for name in names))

    def _hook_group(self, index: int) -> None:
        """Place a group's hooks, in place of those it has."""
        group, capture = self.param_groups[index], self._captures[index]
        capture.remove()
        capture.settings = self._hook_settings(group)
        self._rolls.pop(index, None)
        for parameter in group["params"]:
            self._lags.pop(parameter, None)
        gradients, inputs = self.recipe.geometry.captured_sides(group)
        if self._model is None or not (gradients or inputs):
            return

        def sampling(weight: Tensor) -> Sampling:
            ones = self._specs.get(weight, PLAIN).bias is not None
            return Sampling(group["token_stride"], group["token_skip"], group["reduce"], ones)

        modules = watched_modules(self._model, sampling)
        watched = [p for p in group["params"] if is_matrix(group, p) and p in modules]
        if group.get("stagger"):
            self._lags.update(zip(watched, staggered(watched), strict=True))
        for parameter in watched:
            capture.watch(
                parameter,
                modules[parameter],
                inputs=inputs,
                gradients=gradients,
                lag=self._lags.get(parameter, 0.0),
            )
